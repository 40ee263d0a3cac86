/** Sorting by a column, kept in the address. */
import { computed, type ComputedRef } from 'vue'
import { useQuery } from './query'

export interface Sorting<R> {
  sorted: ComputedRef<R[]>
  by: ComputedRef<{ column: string; down: boolean }>
  toggle: (column: string) => void
}

export function useSorting<R>(rows: () => R[], columns: Record<string, (row: R) => number | string>, initial: string): Sorting<R> {
  const text = useQuery().text('sort', initial)
  const by = computed(() => ({ column: text.value.replace(/^-/, ''), down: text.value.startsWith('-') }))
  const sorted = computed(() => {
    const value = columns[by.value.column]
    if (!value) return rows()
    const sign = by.value.down ? -1 : 1
    return [...rows()].sort((a, b) => {
      const [x, y] = [value(a), value(b)]
      return sign * (typeof x === 'string' ? x.localeCompare(String(y)) : x - (y as number))
    })
  })
  const toggle = (column: string) => {
    text.value = by.value.column === column ? (by.value.down ? column : `-${column}`) : `-${column}`
  }
  return { sorted, by, toggle }
}
