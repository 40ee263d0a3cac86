/**
 * The server's stream of counters and changes (`GET /api/v1/events`), of which each open page has one.
 *
 * It is read with `fetch`, so that a token can be sent. A hidden tab closes it; one that is cut is opened again, later
 * each time. Where the server refuses it to a token, or other windows have too many, `version` moves once a second, and
 * pages ask by themselves.
 */
import { computed, reactive, ref, shallowRef } from 'vue'
import { connection, token } from '@/api/client'

export interface Counters {
  at: string
  rates: { push: number; pop: number; ack: number; failed: number; deadLetters: number; requests: number }
  totals: { pushMessages: number; popMessages: number; ackMessages: number; failed: number; deadLetters: number; requests: number }
  parked: number
  inFlight: number
  /** That 99 % of pushes took at most. */
  pushLatencyMs: number | null
  depth: { at: string; queues: number; partitions: number; stored: number; pending: number; deadLetters: number } | null
  shards: { shard: number; up: boolean; reason: string }[]
  maintenance: { push: boolean; pop: boolean }
  spool: { messages: number; bytes: number; failed: number }
  /** The busiest of this second. */
  queues: { queue: string; push: number; pop: number; ack: number }[]
}
export interface Tick {
  at: number
  push: number
  pop: number
  ack: number
  /** Of all queues; unknown until they were counted. */
  pending: number | null
}

export const stream = reactive({ state: 'connecting' as 'connecting' | 'open' | 'cut' | 'refused', retryAt: 0 })
export const counters = shallowRef<Counters>()
/** Moves when something has changed that a page may show. */
export const version = ref(0)
/** Rates of the last minutes, second by second. */
export const ticks = shallowRef<Tick[]>([])
/** Whether rates are known: the first counters of a stream have nothing before them to be compared with. */
export const paced = computed(() => stream.state === 'open' && ticks.value.length > 0)
export const lost = computed(() => stream.state === 'cut')

const MAX_TICKS = 180
const SILENT_MS = 5000
/** A stream that ends earlier has failed, as one that was not opened. */
const STEADY_MS = 1000
const FIRST_RETRY_MS = 500
const LAST_RETRY_MS = 10_000
/** Browsers open six connections to a server: with a stream on each, the calls of every window would wait for ever. */
const MOST_STREAMS = 4
const windows = new BroadcastChannel('queen.streams')
let begun = 0
let older = 0
let current: AbortController | undefined
let timer: ReturnType<typeof setTimeout> | undefined
let failures = 0
let changed = ''
let first = true

function receive(event: string, data: string): void {
  if (event !== 'counters') {
    version.value += 1
    if (event === 'database') database(JSON.parse(data) as { up: boolean; reason: string })
    return
  }
  const seen = JSON.parse(data) as Counters
  counters.value = seen
  const { requests: _, ...totals } = seen.totals
  const now = JSON.stringify([totals, seen.depth && { ...seen.depth, at: '' }, seen.shards, seen.maintenance, seen.spool])
  if (now !== changed) version.value += 1
  changed = now
  if (first) first = false
  else ticks.value = [...ticks.value.slice(1 - MAX_TICKS), { at: Date.parse(seen.at) / 1000, ...seen.rates, pending: seen.depth?.pending ?? null }]
  const down = seen.shards.filter((one) => !one.up)
  connection.shards = down.length < seen.shards.length ? down.map((one) => one.shard) : []
  database({ up: !down.length, reason: down[0]?.reason ?? '' })
}

function database({ up, reason }: { up: boolean; reason: string }): void {
  connection.database = up
  if (!up) connection.reason = reason
}

async function read(body: ReadableStream<Uint8Array>, alive: () => void): Promise<void> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader()
  let rest = ''
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return
    alive()
    const blocks = (rest + value).split('\n\n')
    rest = blocks.pop() ?? ''
    for (const block of blocks) {
      const fields = new Map(block.split('\n').map((line) => [line.slice(0, line.indexOf(':')), line.slice(line.indexOf(':') + 1).trimStart()]))
      if (fields.has('data')) receive(fields.get('event') ?? 'message', fields.get('data')!)
    }
  }
}

windows.onmessage = ({ data }: MessageEvent<{ begins?: number; not?: number }>) => {
  if (current && data.begins && begun < data.begins) windows.postMessage({ not: data.begins })
  else if (current && data.not === begun && ++older === MOST_STREAMS) {
    close()
    stream.state = 'refused'
  }
}

async function connect(): Promise<void> {
  clearTimeout(timer)
  current?.abort()
  const mine = (current = new AbortController())
  begun = Date.now() + Math.random()
  older = 0
  windows.postMessage({ begins: begun })
  let openedAt = Infinity
  let silence: ReturnType<typeof setTimeout> | undefined
  const alive = () => {
    clearTimeout(silence)
    silence = setTimeout(() => mine.abort(), SILENT_MS)
  }
  alive()
  try {
    const headers: Record<string, string> = { Accept: 'text/event-stream' }
    if (token.get()) headers.Authorization = `Bearer ${token.get()}`
    const answer = await fetch('/api/v1/events', { headers, signal: mine.signal })
    if (answer.status === 401) connection.signIn = true
    if ([401, 403, 404].includes(answer.status)) {
      stream.state = 'refused'
      return
    }
    if (!answer.ok || !answer.body) throw new Error(String(answer.status))
    stream.state = 'open'
    first = true
    openedAt = Date.now()
    connection.server = true
    version.value += 1
    await read(answer.body, alive)
  } catch {
    // What is cut is opened again below.
  } finally {
    clearTimeout(silence)
    if (Date.now() - openedAt >= STEADY_MS) failures = 0
  }
  if (mine !== current || document.visibilityState !== 'visible') return
  if (failures > 0) {
    stream.state = 'cut'
    connection.server = false
    connection.reason = ''
  }
  const wait = failures === 0 ? 0 : Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** (failures - 1)) * (0.75 + Math.random() / 2)
  failures += 1
  stream.retryAt = Date.now() + wait
  timer = setTimeout(connect, wait)
}

function close(): void {
  clearTimeout(timer)
  current?.abort()
  current = undefined
  ticks.value = []
}

/** Opens it, and again after signing in. */
export const openStream = (): void => void connect()

export function startStream(): void {
  document.addEventListener('visibilitychange', () => (document.visibilityState === 'visible' ? openStream() : close()))
  addEventListener('pagehide', close)
  setInterval(() => {
    if (stream.state === 'refused' && document.visibilityState === 'visible' && !connection.signIn) version.value += 1
  }, 1000)
  if (!connection.signIn) openStream()
}
