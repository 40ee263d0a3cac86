/**
 * What keeps an open page current. Pages say what they show with `useLive`; how it is kept current is known here alone:
 * each is asked for again when the stream says that something has changed, at most every so often, and seldom otherwise.
 * A hidden tab asks for nothing.
 */
import { onBeforeUnmount, ref, shallowRef, watch, type Ref, type ShallowRef, type WatchSource } from 'vue'
import { ApiError, connection, get, sendText, type Schema } from '@/api/client'
import { parseMetrics, type Metrics } from '@/lib/metrics'
import { startStream, stream, version } from '@/lib/stream'

export interface Live<A> {
  data: ShallowRef<A | undefined>
  error: Ref<ApiError | null>
  loading: Ref<boolean>
  refresh: () => Promise<void>
}

const active = new Set<() => Promise<void>>()
export const now = ref(Date.now())
setInterval(() => {
  if (document.visibilityState === 'visible') now.value = Date.now()
}, 1000)

/** Of what other hosts did the stream says nothing, and ages grow by themselves. */
const SELDOM_MS = 5000
const AFTER_ERROR_MS = 2000

/**
 * Asks at most every `every` ms (0: once); at once when `depends` change, when the tab is seen again and when the server is
 * back. While `holds`, what is there stays.
 */
export function useLive<A>(ask: () => Promise<A>, every: number, depends: WatchSource[] = [], holds: () => boolean = () => false): Live<A> {
  const data = shallowRef<A>()
  const error = ref<ApiError | null>(null)
  const loading = ref(true)
  let timer: ReturnType<typeof setTimeout> | undefined
  let generation = 0
  let stopped = false
  let asking = false
  let askedAt = 0
  let stale = false

  async function refresh(): Promise<void> {
    clearTimeout(timer)
    const mine = ++generation
    askedAt = Date.now()
    asking = true
    stale = false
    try {
      const answer = await ask()
      if (mine !== generation || stopped) return
      data.value = answer
      error.value = null
    } catch (cause) {
      if (mine !== generation || stopped) return
      error.value = cause instanceof ApiError ? cause : new ApiError(0, String(cause))
    }
    asking = false
    loading.value = false
    schedule()
  }

  function schedule(): void {
    clearTimeout(timer)
    // What a role may not see it may not see in two seconds either.
    if (error.value?.status === 403) return
    if (stopped || asking || holds() || connection.signIn || (every <= 0 && !error.value) || document.visibilityState !== 'visible') return
    const wait = error.value ? Math.max(every, AFTER_ERROR_MS) : stale ? every : Math.max(every, SELDOM_MS)
    timer = setTimeout(refresh, Math.max(0, askedAt + wait - Date.now()))
  }

  function seen(): void {
    if (document.visibilityState === 'visible' && !holds()) void refresh()
    else schedule()
  }

  document.addEventListener('visibilitychange', seen)
  active.add(refresh)
  watch(version, () => {
    stale = true
    schedule()
  })
  watch(holds, schedule)
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
  if (!connection.signIn) void refresh()
  return { data, error, loading, refresh }
}

export async function refreshAll(): Promise<void> {
  await Promise.all([...active].map((refresh) => refresh()))
}

/** Counts of the whole server, which several pages and the menu show. */
export const overview = shallowRef<Schema['Overview']>()

/** Once, by the shell. */
export function useOverview(): void {
  // What changes by the second comes with the stream.
  const { data } = useLive(() => get('/api/v1/resources/overview'), 5000)
  watch(data, (found) => {
    overview.value = found
    if (stream.state === 'refused') connection.database = true
  })
  watch(
    () => [connection.server, connection.database],
    ([server, database], [serverBefore, databaseBefore]) => {
      if (server && database && !(serverBefore && databaseBefore)) void refreshAll()
    },
  )
  startStream()
}

/** Everything that the server counts, as Prometheus gets it. */
export const useMetrics = (every: number): ShallowRef<Metrics | undefined> => useLive(async () => parseMetrics(await sendText('/metrics/prometheus')), every).data
