/** Rows that are picked for an action on many. */
import { computed, onMounted, reactive, watch, type ComputedRef } from 'vue'

export interface Selection<R> {
  picked: ComputedRef<R[]>
  /** Whether there are any: a list holds still meanwhile. */
  some: ComputedRef<boolean>
  has: (row: R) => boolean
  toggle: (row: R) => void
  all: ComputedRef<boolean>
  toggleAll: () => void
  clear: () => void
}

export function useSelection<R>(rows: () => R[], key: (row: R) => string): Selection<R> {
  const chosen = reactive(new Set<string>())
  // What is gone is not picked any more. Rows come from what is set up later.
  onMounted(() =>
    watch(rows, (now) => {
      const there = new Set(now.map(key))
      for (const one of [...chosen]) if (!there.has(one)) chosen.delete(one)
    }),
  )
  const picked = computed(() => rows().filter((one) => chosen.has(key(one))))
  const all = computed(() => rows().length > 0 && picked.value.length === rows().length)
  return {
    picked,
    some: computed(() => chosen.size > 0),
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
