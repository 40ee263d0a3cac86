/** What can be done to consumer groups. */
import { call, get, type Schema } from '@/api/client'
import { pythonValue } from '@/api/shown'
import { doing, type Action, type Effect, type Form } from '@/lib/actions'
import { exact, groupLabel, localInput, plural } from '@/lib/format'

const BEGINNING = '1970-01-01T00:00:00.000Z'

function target(form: Form): { toEnd: true } | { timestamp: string } {
  if (form.to === 'end') return { toEnd: true }
  return { timestamp: form.to === 'beginning' ? BEGINNING : new Date(String(form.time)).toISOString() }
}

/** How many messages would come again and how many would be skipped. */
async function seekEffect(group: string, queue: string, form: Form): Promise<Effect[]> {
  const where = target(form)
  const [log, groups] = await Promise.all([
    get('/api/v1/read/{queue}', { path: { queue }, query: 'timestamp' in where ? { at: where.timestamp } : {} }),
    get('/api/v1/consumer-groups/{group}', { path: { group } }),
  ])
  const lags = new Map((groups[queue]?.partitions ?? []).map((one) => [one.partition, one]))
  let again = 0
  let skipped = 0
  let leases = 0
  for (const one of log.partitions) {
    const seen = lags.get(one.partition)
    const position = one.nextOffset - (seen?.offsetLag ?? 0)
    const to = 'toEnd' in where ? one.nextOffset : (one.offsetAt ?? one.nextOffset)
    again += Math.max(0, position - to)
    skipped += Math.max(0, to - position)
    leases += seen?.leaseActive ? 1 : 0
  }
  const effects: Effect[] = [
    { kind: again ? 'warn' : 'info', text: `${plural(again, 'message')} would be delivered again.` },
    { kind: skipped ? 'bad' : 'info', text: `${plural(skipped, 'message')} would be skipped.` },
    { text: `On ${plural(log.partitions.length, 'partition')}.` },
  ]
  if (leases) effects.push({ kind: 'warn', text: `${plural(leases, 'lease')} of the group ${leases === 1 ? 'ends' : 'end'}; their consumers’ acknowledgments will be refused.` })
  return effects
}

export const seekGroup = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/seek', (group: string, queue: string): Action => ({
  title: 'Seek',
  object: `${groupLabel(group)} on ${queue}`,
  verb: 'Move group',
  fields: [
    {
      name: 'to',
      label: 'Move to',
      kind: 'select',
      initial: 'time',
      options: [
        { value: 'time', label: 'a time' },
        { value: 'beginning', label: 'the beginning' },
        { value: 'end', label: 'the end: skip everything' },
      ],
    },
    { name: 'time', label: 'Time', kind: 'time', initial: localInput(new Date(Date.now() - 3_600_000)), when: (form) => form.to === 'time', required: true, hint: 'The first message pushed at this time or later comes next.' },
  ],
  effect: (form) => seekEffect(group, queue, form),
  calls: (form) => [
    call(
      'post',
      '/api/v1/consumer-groups/{group}/queues/{queue}/seek',
      { path: { group, queue }, body: target(form) },
      `queen.admin.seek_consumer_group(${pythonValue(group)}, ${pythonValue(queue)}, ${pythonValue(target(form))})`,
    ),
  ],
  done: ([answer]) => `${groupLabel(group)} moved on ${plural((answer as Schema['Sought']).partitionsUpdated, 'partition')} of ${queue}`,
}))

export const skipPartition = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek', (group: string, queue: string, partition: string, lag: number): Action => ({
  title: 'Skip to the end of a partition',
  object: `${groupLabel(group)} on ${queue} / ${partition}`,
  verb: 'Skip messages',
  danger: true,
  effect: () => [{ kind: 'bad', text: `${plural(lag, 'message')} would never be delivered to ${groupLabel(group)}.` }],
  calls: () => [call('post', '/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek', { path: { group, queue, partition } })],
  done: () => `${groupLabel(group)} is at the end of ${partition}`,
}))

export const deleteGroup = doing('delete /api/v1/consumer-groups/{group}', (group: string, queue?: string, after?: () => void): Action => ({
  title: queue ? 'Forget a group on a queue' : 'Delete the group',
  object: queue ? `${groupLabel(group)} on ${queue}` : groupLabel(group),
  verb: queue ? 'Forget group' : 'Delete group',
  danger: true,
  typed: groupLabel(group),
  fields: [{ name: 'metadata', label: 'Forget subscriptions, too', kind: 'check', initial: true, hint: 'Otherwise the group begins again where it once began.' }],
  effect: async () => {
    const found = (await get('/api/v1/consumer-groups')).filter((one) => one.name === group && (!queue || one.queueName === queue))
    const partitions = found.reduce((sum, one) => sum + one.members, 0)
    return [
      { kind: 'bad', text: `Its position on ${plural(partitions, 'partition')} of ${plural(found.length, 'queue')} is forgotten.` },
      { kind: 'warn', text: 'A consumer of this name starts again where its subscription says.' },
    ]
  },
  calls: (form) => [
    queue
      ? call(
          'delete',
          '/api/v1/consumer-groups/{group}/queues/{queue}',
          { path: { group, queue }, query: { deleteMetadata: form.metadata === true } },
          `queen.admin.delete_consumer_group_for_queue(${pythonValue(group)}, ${pythonValue(queue)}, delete_metadata=${pythonValue(form.metadata)})`,
        )
      : call(
          'delete',
          '/api/v1/consumer-groups/{group}',
          { path: { group }, query: { deleteMetadata: form.metadata === true } },
          `queen.admin.delete_consumer_group(${pythonValue(group)}, delete_metadata=${pythonValue(form.metadata)})`,
        ),
  ],
  done: ([answer]) => `${groupLabel(group)}: ${exact((answer as Schema['GroupDeleted']).deletedPartitions)} positions forgotten`,
  after,
}))

export const moveSubscription = doing('post /api/v1/consumer-groups/{group}/subscription', (group: string, current: string | null): Action => {
  const timestamp = (form: Form) => new Date(String(form.time)).toISOString()
  return {
    title: 'Change where the group begins',
    object: groupLabel(group),
    verb: 'Change beginning',
    fields: [{ name: 'time', label: 'Begins with messages of', kind: 'time', required: true, initial: localInput(current ? new Date(current) : new Date()) }],
    effect: () => [
      { text: 'On partitions that it has not begun, the group gets messages of this time and later.' },
      { text: 'Where it has a position already, nothing changes: seek to move that.' },
    ],
    calls: (form) => [
      call(
        'post',
        '/api/v1/consumer-groups/{group}/subscription',
        { path: { group }, body: { subscriptionTimestamp: timestamp(form) } },
        `queen.admin.update_consumer_group_timestamp(${pythonValue(group)}, ${pythonValue(timestamp(form))})`,
      ),
    ],
    done: ([answer]) => `${groupLabel(group)} starts elsewhere on ${plural((answer as Schema['SubscriptionMoved']).rowsUpdated, 'subscription')}`,
    undo: () =>
      current ? [call('post', '/api/v1/consumer-groups/{group}/subscription', { path: { group }, body: { subscriptionTimestamp: current } })] : undefined,
  }
})
