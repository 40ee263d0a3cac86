/** Rows that are picked for an action on many. */
import { computed, reactive, type ComputedRef } from 'vue'

export interface Selection<R> {
  picked: ComputedRef<R[]>
  has: (row: R) => boolean
  toggle: (row: R) => void
  all: ComputedRef<boolean>
  toggleAll: () => void
  clear: () => void
}

export function useSelection<R>(rows: () => R[], key: (row: R) => string): Selection<R> {
  const chosen = reactive(new Set<string>())
  const picked = computed(() => rows().filter((one) => chosen.has(key(one))))
  const all = computed(() => rows().length > 0 && picked.value.length === rows().length)
  return {
    picked,
    all,
    has: (row) => chosen.has(key(row)),
    toggle: (row) => void (chosen.delete(key(row)) || chosen.add(key(row))),
    toggleAll: () => {
      const every = all.value
      for (const one of rows())
        if (every) chosen.delete(key(one))
        else chosen.add(key(one))
    },
    clear: () => chosen.clear(),
  }
}
