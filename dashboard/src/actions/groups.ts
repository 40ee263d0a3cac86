/** What can be done to consumer groups. */
import { ref } from 'vue'
import { call, send, type Call, type Schema } from '@/api/client'
import { pythonValue } from '@/api/shown'
import { doing, type Action, type Effect, type Form } from '@/lib/actions'
import { groupLabel, localInput, plural } from '@/lib/format'
import { groupPage, groupsOf } from '@/lib/groups'
import { queueExists, queueNames } from '@/lib/queues'

type Target = { toEnd: true } | { toBeginning: true } | { timestamp: string } | { offset: number }

function target(form: Form): Target {
  if (form.to === 'end') return { toEnd: true }
  if (form.to === 'beginning') return { toBeginning: true }
  return form.to === 'offset' ? { offset: Number(form.offset) } : { timestamp: new Date(String(form.time)).toISOString() }
}

/** Of more partitions a part is moved with each call, so that it is seen how far it is. */
const PARTS_OF = 1000
const PART = 5000
/** Milliseconds that a preview may take before it is estimated, and that its exact count is then waited for. */
const AT_ONCE = 150
const PATIENCE = 60_000

// What is shown does all of it with one call: who does it by hand needs no progress.
const undone = (group: string, queue: string, seekId: number, cursor?: string) => ({
  ...call(
    'post',
    '/api/v1/consumer-groups/{group}/queues/{queue}/seek/undo',
    { path: { group, queue }, body: cursor === undefined ? { seekId } : { seekId, limit: PART, cursor } },
    `queen.admin.undo_seek(${[group, queue, seekId].map((one) => pythonValue(one)).join(', ')})`,
  ),
  shown: { seekId },
})

/** Puts a group back where it was before a seek. */
export const undoSeek = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/seek/undo', (group: string, queue: string, seek: Schema['KeptSeek']): Action => ({
  title: 'Undo a seek',
  object: `${groupLabel(group)} on ${seek.partition === null ? queue : `${queue} / ${seek.partition}`}`,
  verb: 'Undo seek',
  effect: () => [
    { text: `The group goes back to where it was on ${plural(seek.partitionsChanged, 'partition')} before it went to ${seek.target}.` },
    { kind: 'warn', text: 'What it has consumed since comes again, or is skipped; its leases end.' },
  ],
  calls: () => [undone(group, queue, seek.seekId, seek.partitionsChanged > PARTS_OF ? '' : undefined)],
  next: (answer: Schema['SeekUndone']) => (answer.cursor ? undone(group, queue, seek.seekId, answer.cursor) : undefined),
  progress: { of: (answer: Schema['SeekUndone']) => answer.partitionsUpdated, total: () => seek.partitionsChanged },
  done: (answers) => `${groupLabel(group)} is back on ${plural(moved(answers), 'partition')} of ${queue}`,
}))
const moved = (answers: unknown[]) => (answers as { partitionsUpdated: number }[]).reduce((sum, one) => sum + one.partitionsUpdated, 0)

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
  const ask = (form: Form, within: number) =>
    send({ ...call('get', '/api/v1/consumer-groups/{group}/queues/{queue}/seek/preview', { path: { group, queue }, query: { ...target(form), partition, limit: 1, within } }), timeout: 2 * PATIENCE })
  const said = ({ redelivered, skipped, leases, partitionsChanged, exact: counted }: Schema['SeekPreview']): Effect[] => {
    const about = counted ? '' : 'About '
    return [
      { kind: redelivered ? 'warn' : 'info', text: `${about}${plural(redelivered, 'message')} would be delivered again.` },
      { kind: skipped ? 'bad' : 'info', text: `${about}${plural(skipped, 'message')} would be skipped.` },
      { text: `The position changes on ${about.toLowerCase()}${plural(partitionsChanged, 'partition')}.` },
      ...(leases ? [{ kind: 'warn' as const, text: `${about}${plural(leases, 'lease')} of the group ${leases === 1 ? 'ends' : 'end'}; acknowledgments of ${leases === 1 ? 'its consumer' : 'their consumers'} will be refused.` }] : []),
      ...(counted ? [] : [{ text: 'Estimated from some of the partitions; they are being counted.' }]),
    ]
  }
  let asked = 0
  const effect = async (form: Form, meanwhile: (effects: Effect[]) => void): Promise<Effect[]> => {
    const mine = ++asked
    // Where else it would go is not of interest any more.
    const keep = (found: Schema['SeekPreview']) => (mine === asked ? (preview = found) : found)
    const first = keep(await ask(form, AT_ONCE))
    if (first.exact) return said(first)
    meanwhile(said(first))
    return said(keep(await ask(form, PATIENCE)))
  }
  const whole = (form: Form, cursor?: string): Call<any> => ({
    ...call(
      'post',
      '/api/v1/consumer-groups/{group}/queues/{queue}/seek',
      { path: { group, queue }, body: cursor === undefined ? target(form) : { ...target(form), limit: PART, cursor } },
      `queen.admin.seek_consumer_group(${[group, queue, target(form)].map((one) => pythonValue(one)).join(', ')})`,
    ),
    shown: target(form),
  })
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
      partition !== undefined
        ? seekPartition(group, queue, partition, target(form))
        : whole(form, (preview?.partitionsKnown ?? 0) > PARTS_OF ? '' : undefined),
    ],
    next: (answer: Partial<Schema['Sought']>, form) => (answer.cursor ? whole(form, answer.cursor) : undefined),
    progress: { of: (answer: Partial<Schema['Sought']>) => answer.partitionsUpdated ?? 1, total: () => preview?.partitionsKnown },
    done: () => `${groupLabel(group)} moved on ${preview?.exact === false ? 'about ' : ''}${plural(preview?.partitionsChanged ?? 1, 'partition')} of ${queue}`,
    undo: ([first]) => {
      const { seekId } = first as Schema['Sought']
      return seekId ? [undone(group, queue, seekId, (preview?.partitionsKnown ?? 0) > PARTS_OF ? '' : undefined)] : undefined
    },
    undoNext: (answer: Schema['SeekUndone'], first: Call<any>) => (answer.cursor ? { ...first, body: { ...(first.body as object), cursor: answer.cursor } } : undefined),
  }
})

/** A group is made by a pop: one that begins with new messages takes none. Where else it is to begin, it is moved to. */
export const createGroup = doing('post /api/v1/consumer-groups/{group}/queues/{queue}/seek', (queue: string = '', after?: (group: string, queue: string) => void): Action => {
  const unable = ref('')
  const starts = (form: Form): Target => (form.from === 'beginning' ? { toBeginning: true } : { timestamp: new Date(String(form.time)).toISOString() })
  return {
    title: 'Create a consumer group',
    object: queue,
    intro: 'Groups are also made by their first pop.',
    verb: 'Create group',
    inOrder: true,
    fields: [
      { name: 'group', label: 'Group', kind: 'text', required: true, placeholder: 'billing' },
      ...(queue ? [] : [{ name: 'queue', label: 'Queue', kind: 'text' as const, required: true, placeholder: 'orders', suggest: queueNames }]),
      {
        name: 'from',
        label: 'Begins with',
        kind: 'select',
        initial: 'new',
        options: [
          { value: 'new', label: 'messages from now on' },
          { value: 'beginning', label: 'all messages that are stored' },
          { value: 'time', label: 'messages of a time' },
        ],
      },
      { name: 'time', label: 'Time', kind: 'time', initial: localInput(new Date(Date.now() - 3_600_000)), when: (form) => form.from === 'time', required: true, hint: 'The first message pushed at this time or later comes first.' },
    ],
    effect: async (form) => {
      const [group, of] = [String(form.group), queue || String(form.queue)]
      if (!group || !of) return [{ text: 'Name the group and its queue.' }]
      const groups = await groupsOf(of)
      unable.value = !(await queueExists(of)) ? `There is no queue ${of}.` : groups.some((one) => one.name === group) ? `${group} reads ${of} already: seek to move it.` : ''
      return unable.value ? [{ kind: 'bad', text: unable.value }] : [{ text: `${group} gets messages of ${of}${groups.length ? ` besides the ${plural(groups.length, 'other group')}, which ${groups.length === 1 ? 'notices' : 'notice'} nothing` : ': it is the first group that reads it'}.` }]
    },
    calls: (form) => {
      const [group, of] = [String(form.group), queue || String(form.queue)]
      if (unable.value) return []
      const made = call(
        'get',
        '/api/v1/pop/queue/{queue}',
        { path: { queue: of }, query: { consumerGroup: group, subscriptionMode: 'new' } },
        `queen.queue(${pythonValue(of)}).group(${pythonValue(group)}).subscription_mode("new").pop()`,
      )
      if (form.from === 'new') return [made]
      return [
        made,
        call(
          'post',
          '/api/v1/consumer-groups/{group}/queues/{queue}/seek',
          { path: { group, queue: of }, body: starts(form) },
          `queen.admin.seek_consumer_group(${[group, of, starts(form)].map((one) => pythonValue(one)).join(', ')})`,
        ),
      ]
    },
    done: (_, form) => `Group ${form.group} is made`,
    after: (_, form) => after?.(String(form.group), queue || String(form.queue)),
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
      const found = (await groupPage({ group, queue })).consumer_groups[0]
      return paused
        ? [
            { kind: 'warn', text: `Its consumers get nothing more of ${queue}; other groups go on.` },
            { text: 'What is leased already can be acknowledged. Its position stays.' },
          ]
        : [{ text: `${plural(found?.totalLag ?? 0, 'message that waits is', 'messages that wait are')} delivered again.` }]
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
    const { consumer_groups: found, total } = await groupPage({ group, queue })
    const partitions = found.reduce((sum, one) => sum + one.members, 0)
    return [
      { kind: 'bad', text: `Its position on ${found.length < total ? 'more than ' : ''}${plural(partitions, 'partition')} of ${plural(total, 'queue')} is forgotten.` },
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
  done: ([answer]) => `${groupLabel(group)}: ${plural((answer as Schema['GroupDeleted']).deletedPartitions, 'position')} forgotten`,
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
