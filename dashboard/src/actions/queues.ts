/** What can be done to queues. */
import { call, get, type Schema } from '@/api/client'
import { adminPython, pythonValue } from '@/api/shown'
import { doing, type Action, type Effect, type Field, type Form } from '@/lib/actions'
import { exact, plural } from '@/lib/format'
import { groupsOf } from '@/lib/groups'
import { parseJson } from '@/lib/json'
import { queueExists, queueNames } from '@/lib/queues'

type Options = Record<string, number | boolean | null>

const OPTIONS: (Field & { fallback: number | boolean | null })[] = [
  { name: 'leaseTime', label: 'Lease', unit: 'seconds', kind: 'number', fallback: 300, group: 'Delivery', hint: 'How long a delivered message is its consumer’s.' },
  { name: 'priority', label: 'Priority', kind: 'number', fallback: 0, group: 'Delivery', hint: 'Among the queues of a namespace or task.' },
  { name: 'delayedProcessing', label: 'Delay', unit: 'seconds', kind: 'number', fallback: 0, group: 'Delivery', hint: 'From push to first delivery.' },
  { name: 'windowBuffer', label: 'Quiet time', unit: 'seconds', kind: 'number', fallback: 0, group: 'Delivery', hint: 'A partition is delivered once nothing came for so long.' },
  { name: 'retryLimit', label: 'Retries', kind: 'number', fallback: 3, group: 'Failure', hint: 'Redeliveries of a failed message.' },
  { name: 'retryDelay', label: 'Retry delay', unit: 'ms', kind: 'number', fallback: 1000, group: 'Failure' },
  { name: 'deadLetterQueue', label: 'Keep dead letters', kind: 'check', fallback: false, group: 'Failure' },
  { name: 'dlqAfterMaxRetries', label: 'Dead letter after the last retry', kind: 'check', fallback: false, group: 'Failure' },
  { name: 'retentionEnabled', label: 'Remove old messages', kind: 'check', fallback: false, group: 'Retention' },
  { name: 'retentionSeconds', label: 'Keep messages', unit: 'seconds', kind: 'number', fallback: 0, group: 'Retention', when: (form) => form.retentionEnabled === true },
  { name: 'completedRetentionSeconds', label: 'Keep completed', unit: 'seconds', kind: 'number', fallback: 0, group: 'Retention', when: (form) => form.retentionEnabled === true },
  { name: 'maxWaitTimeSeconds', label: 'Evict after waiting', unit: 'seconds', kind: 'number', fallback: 0, group: 'Retention', hint: '0: never.' },
  { name: 'ttl', label: 'Time to live', unit: 'seconds', kind: 'number', fallback: null, group: 'Retention', hint: 'Empty: for ever.' },
  { name: 'maxSize', label: 'Most messages', kind: 'number', fallback: 0, group: 'Limits', hint: '0: no limit.' },
  { name: 'dedupWindowSeconds', label: 'Deduplicate within', unit: 'seconds', kind: 'number', fallback: null, group: 'Limits', hint: 'Empty: as the server is set.' },
  { name: 'encryptionEnabled', label: 'Encrypt payloads', kind: 'check', fallback: false, group: 'Limits' },
]

function optionsOf(form: Form): Options {
  return Object.fromEntries(
    OPTIONS.map((one) => {
      const value = form[one.name]
      if (one.kind === 'check') return [one.name, value === true]
      return [one.name, value === '' || value === undefined ? null : Number(value)]
    }),
  )
}

const shown = (name: string, value: number | boolean | null | undefined) => (value === null || value === undefined ? (name === 'ttl' ? 'for ever' : 'as the server is set') : String(value))

function configure(queue: string, namespace: string, task: string, options: Options) {
  const known = { queue, namespace, task, options }
  return call('post', '/api/v1/configure', { body: known }, adminPython('configure_queue', [queue, options], { namespace: namespace || undefined, task: task || undefined }))
}

export const createQueue = doing('post /api/v1/configure', (after: (name: string) => void): Action => ({
  title: 'Create a queue',
  intro: 'Queues are also made by the first push to them.',
  verb: 'Create queue',
  fields: [
    { name: 'queue', label: 'Name', kind: 'text', required: true, placeholder: 'orders' },
    { name: 'namespace', label: 'Namespace', kind: 'text', placeholder: 'shop', hint: 'Optional. Consumers can pop all queues of a namespace.' },
    { name: 'task', label: 'Task', kind: 'text', placeholder: 'checkout', hint: 'Optional. Consumers can pop all queues of a task.' },
    ...OPTIONS.map((one) => ({ ...one, initial: one.fallback ?? '' })),
  ],
  effect: async (form) => {
    const name = String(form.queue)
    if (!name) return [{ text: 'A queue with one empty partition.' }]
    return (await queueExists(name))
      ? [{ kind: 'warn', text: `${name} exists already: its options would be replaced, its messages stay.` }]
      : [{ text: `The queue ${name} is made, with one empty partition.` }]
  },
  calls: (form) => [configure(String(form.queue), String(form.namespace ?? ''), String(form.task ?? ''), optionsOf(form))],
  done: (_, form) => `Queue ${form.queue} is configured`,
  after: (_, form) => after(String(form.queue)),
}))

export const configureQueue = doing('post /api/v1/configure', (status: Schema['QueueStatus']): Action => {
  const { name, namespace, task } = status.queue
  const options = status.queue.options as Options
  return {
    title: 'Change options',
    object: name,
    verb: 'Save changes',
    fields: [
      { name: 'namespace', label: 'Namespace', kind: 'text', initial: namespace },
      { name: 'task', label: 'Task', kind: 'text', initial: task },
      ...OPTIONS.map((one) => ({ ...one, initial: options[one.name] ?? '' })),
    ],
    changes: (form) => {
      const next = optionsOf(form)
      const changed = OPTIONS.filter((one) => next[one.name] !== options[one.name]).map((one) => ({
        name: one.name,
        before: shown(one.name, options[one.name]),
        after: shown(one.name, next[one.name]),
      }))
      if (form.namespace !== namespace) changed.push({ name: 'namespace', before: namespace || '–', after: String(form.namespace) || '–' })
      if (form.task !== task) changed.push({ name: 'task', before: task || '–', after: String(form.task) || '–' })
      return changed
    },
    calls: (form) => [configure(name, String(form.namespace), String(form.task), optionsOf(form))],
    done: () => `Options of ${name} are changed`,
    undo: () => [configure(name, namespace, task, options)],
  }
})

async function heldBy(queue: string, partition?: string): Promise<Effect[]> {
  const groups = await groupsOf(queue)
  if (partition) return [{ kind: 'bad', text: `All messages of the partition ${partition} are removed for every group.` }]
  const status = await get('/api/v1/status', { query: { queue } })
  const { total, pending, processing } = status.messages
  const effects: Effect[] = [
    { kind: 'bad', text: `${plural(total, 'message')} ${total === 1 ? 'is' : 'are'} removed: ${exact(pending)} pending, ${exact(processing)} being processed.` },
  ]
  if (groups.length) effects.push({ kind: 'warn', text: `${plural(groups.length, 'consumer group reads', 'consumer groups read')} it: ${groups.slice(0, 4).map((one) => one.name).join(', ')}${groups.length > 4 ? '…' : ''}` })
  return effects
}

export const clearQueue = doing('delete /api/v1/queues/{queue}/clear', (queue: string, partition?: string): Action => ({
  title: partition ? 'Clear a partition' : 'Clear the queue',
  object: partition ? `${queue} / ${partition}` : queue,
  verb: 'Remove all messages',
  danger: true,
  typed: partition ?? queue,
  intro: 'The queue, its options and its groups stay. What is removed cannot be brought back.',
  effect: () => heldBy(queue, partition),
  calls: () => [
    call(
      'delete',
      '/api/v1/queues/{queue}/clear',
      { path: { queue }, query: { partition } },
      `queen.admin.clear_queue(${pythonValue(queue)}${partition ? `, partition=${pythonValue(partition)}` : ''})`,
    ),
  ],
  done: ([answer]) => `${plural((answer as Schema['Cleared']).messages, 'message')} removed from ${partition ?? queue}`,
}))

/** Nothing of a queue is delivered until it is resumed. */
export const pauseQueue = doing('post /api/v1/resources/queues/{queue}/pause', (queue: string, paused: boolean): Action => {
  const put = (now: boolean) =>
    call('post', now ? '/api/v1/resources/queues/{queue}/pause' : '/api/v1/resources/queues/{queue}/resume', { path: { queue } }, `queen.admin.${now ? 'pause' : 'resume'}_queue(${pythonValue(queue)})`)
  return {
    title: paused ? 'Pause the queue' : 'Resume the queue',
    object: queue,
    verb: paused ? 'Pause queue' : 'Resume queue',
    effect: async () => {
      const { pending } = (await get('/api/v1/status', { query: { queue } })).messages
      return paused
        ? [
            { kind: 'warn', text: 'No group gets anything of it; pushes are stored as before.' },
            { text: 'What is leased already can be acknowledged.' },
          ]
        : [{ text: `${plural(pending, 'pending message')} ${pending === 1 ? 'is' : 'are'} delivered again.` }]
    },
    calls: () => [put(paused)],
    done: () => `${queue} is ${paused ? 'paused' : 'resumed'}`,
    undo: () => [put(!paused)],
  }
})

export const deleteQueue = doing('delete /api/v1/resources/queues/{queue}', (queue: string, after?: () => void): Action => ({
  title: 'Delete the queue',
  object: queue,
  verb: 'Delete queue',
  danger: true,
  typed: queue,
  intro: 'The queue goes with its partitions, messages, groups’ positions, dead letters and traces. It cannot be brought back.',
  effect: () => heldBy(queue),
  calls: () => [call('delete', '/api/v1/resources/queues/{queue}', { path: { queue } }, `queen.queue(${pythonValue(queue)}).delete()`)],
  done: () => `Queue ${queue} is deleted`,
  after,
}))

export const pushMessage = doing('post /api/v1/push', (queue: string = '', partition: string = '', payload: unknown = { hello: 'world' }): Action => ({
  title: 'Push a test message',
  object: queue,
  verb: 'Push message',
  fields: [
    { name: 'queue', label: 'Queue', kind: 'text', initial: queue, required: true, placeholder: 'orders', suggest: queueNames },
    { name: 'partition', label: 'Partition', kind: 'text', initial: partition, placeholder: 'Default' },
    { name: 'transactionId', label: 'Transaction id', kind: 'text', placeholder: 'made by the server', hint: 'The same id again is a duplicate, and changes nothing.' },
    { name: 'payload', label: 'Payload', kind: 'json', initial: JSON.stringify(payload, null, 2), required: true },
  ],
  effect: async (form) => {
    if (!form.queue) return [{ text: 'Name the queue first.' }]
    const groups = await groupsOf(String(form.queue))
    return [
      {
        text: groups.length
          ? `Real consumers get it: ${groups.slice(0, 5).map((one) => one.name).join(', ')}.`
          : 'No group reads this queue yet; the message waits.',
        kind: groups.length ? 'warn' : 'info',
      },
    ]
  },
  calls: (form) => {
    const item = {
      queue: String(form.queue),
      partition: String(form.partition || 'Default'),
      payload: parseJson(String(form.payload)) as never,
      ...(form.transactionId ? { transactionId: String(form.transactionId) } : {}),
    }
    const message = { data: item.payload, ...(item.transactionId ? { transactionId: item.transactionId } : {}) }
    const place = `queen.queue(${pythonValue(item.queue)})${form.partition ? `.partition(${pythonValue(item.partition)})` : ''}`
    return [call('post', '/api/v1/push', { body: { items: [item] } }, `${place}.push([${pythonValue(message)}])`)]
  },
  done: ([answer]) => {
    const [result] = answer as Schema['PushResult'][]
    return result?.status === 'duplicate' ? 'It was there already: nothing is changed' : `Message ${result?.transaction_id} is ${result?.status}`
  },
  undo: ([answer]) => {
    const [result] = answer as Schema['PushResult'][]
    if (result?.status !== 'queued' || !result.partition_id) return undefined
    return [call('delete', '/api/v1/messages/{partition}/{transaction}', { path: { partition: result.partition_id, transaction: result.transaction_id } })]
  },
}))
