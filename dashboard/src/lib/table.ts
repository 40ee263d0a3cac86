/** Tables: what a column shows, and which rows are shown. Sort and page are kept in the address. */
import { computed, type ComputedRef, type WatchSource, type WritableComputedRef } from 'vue'
import type { RouteLocationRaw } from 'vue-router'
import { useLive, type Live } from './live'
import { useQuery } from './query'

export interface Column<R> {
  key: string
  label: string
  right?: boolean
  muted?: boolean
  mono?: boolean
  /** What it is sorted by; `true` where the server sorts. */
  sort?: true | ((row: R) => number | string)
  text?: (row: R) => string
  /** A name that somebody chose. */
  name?: (row: R) => string | null | undefined
  at?: (row: R) => string | null | undefined
  badge?: (row: R) => { text: string; tone: string }
  to?: (row: R) => RouteLocationRaw | undefined
  tone?: (row: R) => string
  title?: (row: R) => string
  /** A second line under the first, and smaller. */
  sub?: (row: R) => string
  class?: string
  hidden?: boolean
  /** Left out where there is not much room: what is said elsewhere, too. */
  wide?: boolean
}

export interface Table<R> {
  /** Those of this page; unknown until the server has answered. */
  rows: ComputedRef<R[] | undefined>
  total: ComputedRef<number | undefined>
  page: WritableComputedRef<number>
  size: number
  by: ComputedRef<{ column: string; down: boolean }>
  sortBy: (column: string) => void
}

interface Options {
  /** The initial order. */
  sort?: string
  size?: number
  /** Of the names in the address, where a page has more than one table. */
  prefix?: string
}

function useOrder({ sort = '', size = 50, prefix = '' }: Options) {
  const query = useQuery()
  const given = query.text(`${prefix}sort`)
  const text = computed(() => given.value || sort)
  const page = query.number(`${prefix}page`, 0)
  const by = computed(() => ({ column: text.value.replace(/^-/, ''), down: text.value.startsWith('-') }))
  const sortBy = (column: string) => {
    const down = by.value.column !== column || !by.value.down
    const next = `${down ? '-' : ''}${column}`
    query.set({ [`${prefix}sort`]: next === sort ? undefined : next, [`${prefix}page`]: undefined })
  }
  return { text, page, size, by, sortBy }
}

/** Rows that are all here. */
export function useTable<R>(columns: () => Column<R>[], all: () => R[] | undefined, options: Options = {}): Table<R> {
  const { page, size, by, sortBy } = useOrder(options)
  const sorted = computed(() => {
    const rows = all()
    const value = columns().find((one) => one.key === by.value.column)?.sort
    if (!rows || typeof value !== 'function') return rows
    const sign = by.value.down ? -1 : 1
    return [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)]
      return sign * (typeof x === 'string' ? x.localeCompare(String(y)) : x - (y as number))
    })
  })
  const rows = computed(() => sorted.value?.slice(page.value * size, (page.value + 1) * size))
  return { rows, total: computed(() => sorted.value?.length), page, size, by, sortBy }
}

export interface Asked {
  limit: number
  offset: number
  /** `-pending` and the like. */
  sort: string
}

/** A sort of the address as the server's parameters. */
export const inOrder = <S extends string>(sort: string) => (sort ? { sort: sort.replace(/^-/, '') as S, order: sort.startsWith('-') ? ('desc' as const) : ('asc' as const) } : {})

/** Rows that the server searches, sorts and pages. */
export function useServerTable<R, A>(
  ask: (asked: Asked) => Promise<A>,
  found: (answer: A) => { rows: R[] | undefined; total: number | undefined },
  options: Options & { every?: number; depends?: WatchSource[]; holds?: () => boolean } = {},
): Table<R> & { live: Live<A> } {
  const { text, page, size, by, sortBy } = useOrder(options)
  const live = useLive(() => ask({ limit: size, offset: page.value * size, sort: text.value }), options.every ?? 1000, [text, page, ...(options.depends ?? [])], options.holds)
  const answer = computed(() => (live.data.value === undefined ? undefined : found(live.data.value)))
  return { rows: computed(() => answer.value?.rows), total: computed(() => answer.value?.total), page, size, by, sortBy, live }
}
