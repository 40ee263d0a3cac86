/** Spans of time that charts are shown for; as `range=6h`, or `range=<from>..<to>` for one's own. */
import { computed, type ComputedRef, type WritableComputedRef } from 'vue'
import { useQuery } from './query'

/** How long, and the buckets that the server counts it in, in minutes. */
const SPANS: Record<string, [number, number]> = { '15m': [15, 1], '1h': [60, 1], '6h': [360, 5], '24h': [1440, 15], '7d': [10_080, 60] }
const MINUTE_MS = 60_000

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
    const [minutes, bucket] = SPANS[range.value] ?? SPANS[initial] ?? [60, 1]
    return () => {
      const until = Date.now()
      // From the beginning of a bucket: the first point of a chart would be too low otherwise.
      const from = Math.ceil((until - minutes * MINUTE_MS) / (bucket * MINUTE_MS)) * bucket * MINUTE_MS
      return { from: new Date(from).toISOString(), to: new Date(until).toISOString() }
    }
  })
  return { range, span }
}
