/** Consumer groups in tables: the same columns wherever they are listed. */
import type { Schema } from '@/api/client'
import { count, duration, groupLabel } from './format'
import { lagTone } from './series'
import type { Column } from './table'

const TONES: Record<string, string> = { Stable: 'good', Lagging: 'warn' }

export const GROUP_COLUMNS: Column<Schema['GroupSummary']>[] = [
  { key: 'name', label: 'Group', name: (one) => groupLabel(one.name), to: (one) => ({ name: 'group', params: { group: one.name }, query: { queue: one.queueName } }), sort: (one) => groupLabel(one.name) },
  { key: 'partitions', label: 'Partitions', right: true, muted: true, text: (one) => count(one.members), sort: (one) => one.members },
  { key: 'withLag', label: 'With lag', right: true, text: (one) => count(one.partitionsWithLag), sort: (one) => one.partitionsWithLag },
  { key: 'behind', label: 'Messages behind', right: true, text: (one) => count(one.totalLag), sort: (one) => one.totalLag },
  { key: 'lag', label: 'Lag', right: true, text: (one) => duration(one.maxTimeLag), tone: (one) => lagTone(one.maxTimeLag), sort: (one) => one.maxTimeLag },
  { key: 'state', label: 'State', badge: (one) => (one.paused ? { text: 'paused', tone: 'accent' } : one.queuePaused ? { text: 'queue paused', tone: 'accent' } : { text: one.state, tone: TONES[one.state] ?? '' }) },
]
