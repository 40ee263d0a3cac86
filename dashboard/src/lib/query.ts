/** Filters that live in the address, so that every view can be linked to. */
import { computed, type WritableComputedRef } from 'vue'
import { useRoute, useRouter } from 'vue-router'

type Values = Record<string, string | number | undefined>

export function useQuery(): {
  text: (name: string, initial?: string) => WritableComputedRef<string>
  number: (name: string, initial: number) => WritableComputedRef<number>
  set: (values: Values) => void
  /** Shows something over the page, or elsewhere in it: the browser's Back ends that. */
  open: (values: Values) => void
  /** Ends it: where it was opened from the page itself, as Back does. */
  close: (...names: string[]) => void
} {
  const route = useRoute()
  const router = useRouter()

  function changed(values: Values) {
    const query = { ...route.query }
    for (const [name, value] of Object.entries(values))
      if (value === undefined || value === '') delete query[name]
      else query[name] = String(value)
    return router.resolve({ query, hash: route.hash })
  }
  const set = (values: Values) => void router.replace(changed(values))
  const open = (values: Values) => void router.push(changed(values))
  function close(...names: string[]): void {
    const without = changed(Object.fromEntries(names.map((name) => [name, undefined])))
    if ((history.state as { back?: string } | null)?.back === without.fullPath) router.back()
    else void router.replace(without)
  }

  const raw = (name: string) => {
    const value = route.query[name]
    return typeof value === 'string' ? value : undefined
  }

  return {
    text: (name, initial = '') =>
      computed({
        get: () => raw(name) ?? initial,
        set: (value) => set({ [name]: value === initial ? undefined : value, page: undefined }),
      }),
    number: (name, initial) =>
      computed({
        get: () => {
          const value = Number(raw(name) ?? initial)
          return Number.isFinite(value) && value >= 0 ? value : initial
        },
        set: (value) => set({ [name]: value === initial ? undefined : value }),
      }),
    set,
    open,
    close,
  }
}
