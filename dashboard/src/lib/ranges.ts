/** Spans of time that charts are shown for; as `range=6h`, or `range=<from>..<to>` for one's own. */
import { computed, type ComputedRef, type WritableComputedRef } from 'vue'
import { useQuery } from './query'

const SPANS: Record<string, number> = { '15m': 15, '1h': 60, '6h': 360, '24h': 1440, '7d': 10_080 }

export interface TimeSpan {
  from: string
  to: string
}

export function useRange(initial = '1h'): { range: WritableComputedRef<string>; span: ComputedRef<() => TimeSpan> } {
  const range = useQuery().text('range', initial)
  const span = computed(() => {
    const [from, to] = range.value.split('..')
    if (to !== undefined && !Number.isNaN(Date.parse(from!)) && !Number.isNaN(Date.parse(to)))
      return () => ({ from: new Date(from!).toISOString(), to: new Date(to).toISOString() })
    const minutes = SPANS[range.value] ?? SPANS[initial] ?? 60
    return () => {
      const until = Date.now()
      return { from: new Date(until - minutes * 60_000).toISOString(), to: new Date(until).toISOString() }
    }
  })
  return { range, span }
}
