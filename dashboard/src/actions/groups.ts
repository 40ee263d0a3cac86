/** What can be done to consumer groups. */
import { call, get, type Call, type Schema } from '@/api/client'
import { pythonValue } from '@/api/shown'
import { doing, type Action, type Effect, type Form } from '@/lib/actions'
import { exact, groupLabel, localInput, plural } from '@/lib/format'
import { groupPage, groupsOf } from '@/lib/groups'

type Target = { toEnd: true } | { toBeginning: true } | { timestamp: string } | { offset: number }

function target(form: Form): Target {
  if (form.to === 'end') return { toEnd: true }
  if (form.to === 'beginning') return { toBeginning: true }
  return form.to === 'offset' ? { offset: Number(form.offset) } : { timestamp: new Date(String(form.time)).toISOString() }
}

/** More are not moved back by one click. */
const MOST_UNDONE = 1000

const seekPartition = (group: string, queue: string, partition: string, to: Target) =>
  call(
    'post',
    '/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek',
    { path: { group, queue, partition }, body: to },
    `queen.admin.seek_partition(${[group, queue, partition, to].map((one) => pythonValue(one)).join(', ')})`,
  )

/** Moves a group on a queue, or on one partition of it; what would come again or be skipped is the server's own count. */
export const seekGroup = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/seek', (group: string, queue: string, partition?: string, to: string = 'time'): Action => {
  let preview: Schema['SeekPreview'] | undefined
  const effect = async (form: Form): Promise<Effect[]> => {
    preview = await get('/api/v1/consumer-groups/{group}/queues/{queue}/seek/preview', { path: { group, queue }, query: { ...target(form), partition, limit: MOST_UNDONE } })
    const { redelivered, skipped, leases, partitionsChanged } = preview
    return [
      { kind: redelivered ? 'warn' : 'info', text: `${plural(redelivered, 'message')} would be delivered again.` },
      { kind: skipped ? 'bad' : 'info', text: `${plural(skipped, 'message')} would be skipped.` },
      { text: `The position changes on ${plural(partitionsChanged, 'partition')}.` },
      ...(leases ? [{ kind: 'warn' as const, text: `${plural(leases, 'lease')} of the group ${leases === 1 ? 'ends' : 'end'}; acknowledgments of ${leases === 1 ? 'its consumer' : 'their consumers'} will be refused.` }] : []),
    ]
  }
  return {
    title: 'Seek',
    object: `${groupLabel(group)} on ${partition === undefined ? queue : `${queue} / ${partition}`}`,
    verb: 'Move group',
    fields: [
      {
        name: 'to',
        label: 'Move to',
        kind: 'select',
        initial: to,
        options: [
          { value: 'time', label: 'a time' },
          { value: 'offset', label: 'an offset' },
          { value: 'beginning', label: 'the beginning' },
          { value: 'end', label: 'the end: skip everything' },
        ],
      },
      { name: 'time', label: 'Time', kind: 'time', initial: localInput(new Date(Date.now() - 3_600_000)), when: (form) => form.to === 'time', required: true, hint: 'The first message pushed at this time or later comes next.' },
      { name: 'offset', label: 'Offset', kind: 'number', initial: 0, when: (form) => form.to === 'offset', required: true, hint: 'The message with this offset comes next; on each partition as far as it holds one.' },
    ],
    effect,
    calls: (form) => [
      partition === undefined
        ? call(
            'post',
            '/api/v1/consumer-groups/{group}/queues/{queue}/seek',
            { path: { group, queue }, body: target(form) },
            `queen.admin.seek_consumer_group(${[group, queue, target(form)].map((one) => pythonValue(one)).join(', ')})`,
          )
        : seekPartition(group, queue, partition, target(form)),
    ],
    done: () => `${groupLabel(group)} moved on ${plural(preview?.partitionsChanged ?? 1, 'partition')} of ${queue}`,
    undo: () => {
      const changed = preview?.partitions.filter((one) => one.position !== one.target) ?? []
      if (!changed.length || changed.length < preview!.partitionsChanged) return undefined
      return changed.map((one): Call<any> => seekPartition(group, queue, one.partition, { offset: one.position }))
    },
  }
})

/** Nothing is delivered to a group from a queue until it is resumed. */
export const pauseGroup = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/pause', (group: string, queue: string, paused: boolean): Action => {
  const put = (now: boolean) =>
    call(
      'post',
      now ? '/api/v1/consumer-groups/{group}/queues/{queue}/pause' : '/api/v1/consumer-groups/{group}/queues/{queue}/resume',
      { path: { group, queue } },
      `queen.admin.${now ? 'pause' : 'resume'}_consumer_group(${pythonValue(group)}, ${pythonValue(queue)})`,
    )
  return {
    title: paused ? 'Pause the group' : 'Resume the group',
    object: `${groupLabel(group)} on ${queue}`,
    verb: paused ? 'Pause group' : 'Resume group',
    effect: async () => {
      const found = (await groupsOf(queue)).find((one) => one.name === group)
      return paused
        ? [
            { kind: 'warn', text: `Its consumers get nothing more of ${queue}; other groups go on.` },
            { text: 'What is leased already can be acknowledged. Its position stays.' },
          ]
        : [{ text: `${plural(found?.totalLag ?? 0, 'message')} that wait are delivered again.` }]
    },
    calls: () => [put(paused)],
    done: () => `${groupLabel(group)} is ${paused ? 'paused' : 'resumed'} on ${queue}`,
    undo: () => [put(!paused)],
  }
})

/** Ends the lease that a consumer holds on a partition. */
export const releaseLease = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/release', (group: string, queue: string, partition: string, leaseId: string): Action => ({
  title: 'Release a lease',
  object: `${groupLabel(group)} on ${queue} / ${partition}`,
  verb: 'Release lease',
  effect: () => [
    { text: 'Its messages are delivered again at once, to any consumer of the group.' },
    { kind: 'warn', text: 'The consumer that holds it may finish them, too; its acknowledgments will be refused.' },
  ],
  calls: () => [
    call(
      'post',
      '/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/release',
      { path: { group, queue, partition }, body: { leaseId } },
      `queen.admin.release_lease(${[group, queue, partition, leaseId].map((one) => pythonValue(one)).join(', ')})`,
    ),
  ],
  done: ([answer]) => `The lease has ended; ${plural((answer as Schema['LeaseReleased']).available, 'message')} to deliver`,
}))

export const deleteGroup = doing('delete /api/v1/consumer-groups/{group}', (group: string, queue?: string, after?: () => void): Action => ({
  title: queue ? 'Forget a group on a queue' : 'Delete the group',
  object: queue ? `${groupLabel(group)} on ${queue}` : groupLabel(group),
  verb: queue ? 'Forget group' : 'Delete group',
  danger: true,
  typed: groupLabel(group),
  fields: [{ name: 'metadata', label: 'Forget subscriptions, too', kind: 'check', initial: true, hint: 'Otherwise the group begins again where it once began.' }],
  effect: async () => {
    const found = (await groupPage({ queue, search: group })).consumer_groups.filter((one) => one.name === group)
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
