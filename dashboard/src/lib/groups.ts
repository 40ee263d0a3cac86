/** Consumer groups: as the server pages them, and the columns that they have wherever they are listed. */
import { get, type Schema } from '@/api/client'
import { count, duration, groupLabel } from './format'
import { lagTone } from './series'
import type { Column } from './table'

type Page = Schema['GroupPage']
interface Wanted {
  group?: string
  queue?: string
  namespace?: string
  task?: string
  search?: string
  lagging?: boolean
  sort?: 'name' | 'lag' | 'time' | 'queue'
  order?: 'asc' | 'desc'
  limit?: number
  offset?: number
}
/** The server answers no more at once. */
export const MOST = 1000

/** Without a limit the server answers a bare list; here it is always a page. */
export const groupPage = async (wanted: Wanted = {}): Promise<Page> => (await get('/api/v1/consumer-groups', { query: { limit: MOST, ...wanted } })) as Page
/** The groups of a queue. */
export const groupsOf = async (queue: string) => (await groupPage({ queue })).consumer_groups
/** Those of all queues that are furthest behind, first. */
export const furthestBehind = async (limit = MOST) => groupPage({ sort: 'time', order: 'desc', limit })

const TONES: Record<string, string> = { Stable: 'good', Lagging: 'warn' }
/** The server calls a group dead that has consumed nothing yet. */
const NAMES: Record<string, string> = { Dead: 'not begun' }

export const GROUP_COLUMNS: Column<Schema['GroupSummary']>[] = [
  { key: 'name', label: 'Group', name: (one) => groupLabel(one.name), to: (one) => ({ name: 'group', params: { group: one.name }, query: { queue: one.queueName } }), sort: (one) => groupLabel(one.name) },
  { key: 'partitions', label: 'Partitions', right: true, muted: true, text: (one) => count(one.members), sort: (one) => one.members },
  { key: 'withLag', label: 'With lag', right: true, text: (one) => count(one.partitionsWithLag), sort: (one) => one.partitionsWithLag },
  { key: 'lag', label: 'Messages behind', right: true, text: (one) => count(one.totalLag), sort: (one) => one.totalLag },
  { key: 'time', label: 'Lag', right: true, text: (one) => duration(one.maxTimeLag), tone: (one) => lagTone(one.maxTimeLag), sort: (one) => one.maxTimeLag },
  { key: 'state', label: 'State', badge: (one) => (one.paused ? { text: 'paused', tone: 'accent' } : one.queuePaused ? { text: 'queue paused', tone: 'accent' } : { text: NAMES[one.state] ?? one.state.toLowerCase(), tone: TONES[one.state] ?? '' }) },
]
