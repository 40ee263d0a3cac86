/**
 * What keeps an open page current. Pages say what they show with `useLive`; how it is kept current is known here alone:
 * each is asked for again every so often while the tab is visible, and a hidden tab asks for nothing.
 */
import { onBeforeUnmount, ref, shallowRef, watch, type Ref, type ShallowRef, type WatchSource } from 'vue'
import { ApiError, connection, get, sendText, type Schema } from '@/api/client'
import { parseMetrics, type Metrics } from '@/lib/metrics'

export interface Live<A> {
  data: ShallowRef<A | undefined>
  error: Ref<ApiError | null>
  loading: Ref<boolean>
  refresh: () => Promise<void>
}

const active = new Set<() => Promise<void>>()
export const now = ref(Date.now())
export const updatedAt = ref(Date.now())
setInterval(() => {
  if (document.visibilityState === 'visible') now.value = Date.now()
}, 1000)

/** Asks every `every` ms; at once when `depends` change, when the tab is seen again and when the server is back. */
export function useLive<A>(ask: () => Promise<A>, every: number, depends: WatchSource[] = []): Live<A> {
  const data = shallowRef<A>()
  const error = ref<ApiError | null>(null)
  const loading = ref(true)
  let timer: ReturnType<typeof setTimeout> | undefined
  let generation = 0
  let stopped = false

  async function refresh(): Promise<void> {
    clearTimeout(timer)
    const mine = ++generation
    try {
      const answer = await ask()
      if (mine !== generation || stopped) return
      data.value = answer
      error.value = null
      updatedAt.value = Date.now()
    } catch (cause) {
      if (mine !== generation || stopped) return
      error.value = cause instanceof ApiError ? cause : new ApiError(0, String(cause))
    }
    loading.value = false
    schedule()
  }

  function schedule(): void {
    if (stopped || every <= 0 || document.visibilityState !== 'visible') return
    timer = setTimeout(refresh, error.value ? Math.max(every, 2000) : every)
  }

  function seen(): void {
    if (document.visibilityState === 'visible') void refresh()
    else clearTimeout(timer)
  }

  document.addEventListener('visibilitychange', seen)
  active.add(refresh)
  if (depends.length)
    watch(depends, () => {
      loading.value = true
      void refresh()
    })
  onBeforeUnmount(() => {
    stopped = true
    clearTimeout(timer)
    active.delete(refresh)
    document.removeEventListener('visibilitychange', seen)
  })
  void refresh()
  return { data, error, loading, refresh }
}

export async function refreshAll(): Promise<void> {
  await Promise.all([...active].map((refresh) => refresh()))
}

/** The heart of every page: the overview, once a second, by which the state of the connection is known, too. */
export const overview = shallowRef<Schema['Overview']>()
const HEARTBEAT_MS = 1000

async function beat(): Promise<void> {
  if (document.visibilityState === 'visible' && !connection.signIn) {
    const wasDown = !connection.server || !connection.database
    try {
      overview.value = await get('/api/v1/resources/overview')
      connection.database = true
      if (wasDown) void refreshAll()
    } catch {
      // The banner says it; the next beat tries again.
    }
  }
  setTimeout(beat, HEARTBEAT_MS)
}
export const startHeartbeat = () => void beat()

/** Rates of the last minutes, second by second. */
export interface Tick {
  at: number
  push: number
  pop: number
  ack: number
}

const MAX_TICKS = 180

export function useTicks(): { ticks: ShallowRef<Tick[]>; counters: ShallowRef<Schema['LiveCounters'] | undefined> } {
  const ticks = shallowRef<Tick[]>([])
  let last: { at: number; push: number; pop: number; ack: number } | undefined
  const { data: counters } = useLive(async () => {
    const seen = await get('/api/v1/live')
    const at = Date.now() / 1000
    const next = { at, push: seen.pushMessages, pop: seen.popMessages, ack: seen.ackMessages }
    if (last && at - last.at > 10) last = undefined
    if (last && next.push >= last.push) {
      const seconds = at - last.at
      const rate = (name: 'push' | 'pop' | 'ack') => Math.max(0, (next[name] - last![name]) / seconds)
      const tick = { at, push: rate('push'), pop: rate('pop'), ack: rate('ack') }
      ticks.value = [...ticks.value.slice(1 - MAX_TICKS), tick]
    }
    last = next
    return seen
  }, 1000)
  return { ticks, counters }
}

/** Everything that the server counts, as Prometheus gets it. */
export const useMetrics = (every: number): ShallowRef<Metrics | undefined> => useLive(async () => parseMetrics(await sendText('/metrics/prometheus')), every).data
