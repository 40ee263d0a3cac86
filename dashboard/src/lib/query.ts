/** Filters that live in the address, so that every view can be linked to. */
import { computed, type WritableComputedRef } from 'vue'
import { useRoute, useRouter } from 'vue-router'

export function useQuery(): {
  text: (name: string, initial?: string) => WritableComputedRef<string>
  number: (name: string, initial: number) => WritableComputedRef<number>
  set: (values: Record<string, string | number | undefined>) => void
} {
  const route = useRoute()
  const router = useRouter()

  function set(values: Record<string, string | number | undefined>): void {
    const query = { ...route.query }
    for (const [name, value] of Object.entries(values))
      if (value === undefined || value === '') delete query[name]
      else query[name] = String(value)
    void router.replace({ query, hash: route.hash })
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
  }
}
