/** What can be done to messages and dead letters, one or many. */
import { call, type Call, type Schema } from '@/api/client'
import { pythonValue } from '@/api/shown'
import { doing, type Action, type Effect } from '@/lib/actions'
import { groupLabel, plural } from '@/lib/format'

export interface MessageRef {
  partitionId: string
  transactionId: string
  queue: string
  partition: string
}

const named = (messages: MessageRef[]) => (messages.length === 1 ? messages[0]!.transactionId : plural(messages.length, 'message'))
const queuesOf = (messages: MessageRef[]) => [...new Set(messages.map((one) => one.queue))]

function places(messages: MessageRef[]): Effect {
  const queues = queuesOf(messages)
  return { text: `In ${queues.slice(0, 4).join(', ')}${queues.length > 4 ? ` and ${queues.length - 4} more` : ''}.` }
}

export const retryMessages = doing('post /api/v1/messages/{partition}/{transaction}/retry', (messages: MessageRef[], after?: () => void): Action => ({
  title: 'Retry',
  object: named(messages),
  verb: messages.length === 1 ? 'Retry message' : `Retry ${plural(messages.length, 'message')}`,
  effect: () => [
    { text: `A copy of ${messages.length === 1 ? 'it' : 'each'} is stored at the tail of its partition, for every group.` },
    { text: 'Its dead letters are removed.' },
    places(messages),
  ],
  calls: () =>
    messages.map((one) =>
      call(
        'post',
        '/api/v1/messages/{partition}/{transaction}/retry',
        { path: { partition: one.partitionId, transaction: one.transactionId } },
        `queen.admin.retry_message(${pythonValue(one.partitionId)}, ${pythonValue(one.transactionId)})`,
      ),
    ),
  done: (answers) => `${plural(answers.length, 'message')} queued again`,
  undo: (answers) =>
    (answers as Schema['MessageRetried'][]).every((one) => one.newTransactionId && !one.deadLettersRemoved)
      ? (answers as Schema['MessageRetried'][]).map((one) =>
          call('delete', '/api/v1/messages/{partition}/{transaction}', { path: { partition: one.partitionId, transaction: one.newTransactionId! } }),
        )
      : undefined,
  after,
}))

export const deleteMessages = doing('delete /api/v1/messages/{partition}/{transaction}', (messages: MessageRef[], after?: () => void): Action => ({
  title: messages.length === 1 ? 'Delete a message' : 'Delete messages',
  object: named(messages),
  verb: messages.length === 1 ? 'Delete message' : `Delete ${plural(messages.length, 'message')}`,
  danger: true,
  effect: () => [
    { kind: 'bad', text: `${messages.length === 1 ? 'It is' : 'They are'} removed with dead letters and traces, and cannot be brought back.` },
    { kind: 'warn', text: 'A consumer that has leased it keeps what was delivered.' },
    places(messages),
  ],
  calls: () =>
    messages.map((one) =>
      call(
        'delete',
        '/api/v1/messages/{partition}/{transaction}',
        { path: { partition: one.partitionId, transaction: one.transactionId } },
        `queen.admin.delete_message(${pythonValue(one.partitionId)}, ${pythonValue(one.transactionId)})`,
      ),
    ),
  done: (answers) => `${plural(answers.length, 'message')} deleted`,
  after,
}))

export const moveToDeadLetters = doing('post /api/v1/messages/{partition}/{transaction}/dlq', (messages: MessageRef[], groups: string[], after?: () => void): Action => ({
  title: 'Move to dead letters',
  object: named(messages),
  verb: 'Make dead letter',
  fields: [
    { name: 'group', label: 'For the group', kind: 'select', initial: groups[0] ?? '', options: [...groups.map((one) => ({ value: one, label: groupLabel(one) })), ...(groups.includes('__QUEUE_MODE__') ? [] : [{ value: '', label: 'queue mode' }])] },
    { name: 'error', label: 'Reason', kind: 'text', initial: 'moved by hand', required: true },
  ],
  effect: () => [
    { text: `A dead letter is made of ${messages.length === 1 ? 'it' : 'each'}; the message itself stays in its partition.` },
    { kind: 'warn', text: 'If it is pending it is still delivered.' },
    places(messages),
  ],
  calls: (form) =>
    messages.map((one) =>
      call(
        'post',
        '/api/v1/messages/{partition}/{transaction}/dlq',
        { path: { partition: one.partitionId, transaction: one.transactionId }, body: { consumerGroup: String(form.group) || null, error: String(form.error) } },
        `queen.admin.move_message_to_dlq(${pythonValue(one.partitionId)}, ${pythonValue(one.transactionId)})`,
      ),
    ),
  done: (answers) => `${plural(answers.length, 'dead letter')} made`,
  undo: (answers) =>
    (answers as { queue: string; consumerGroup: string; transactionId: string }[]).map((one) =>
      call('delete', '/api/v1/dlq', { query: { queue: one.queue, consumerGroup: one.consumerGroup, transactionIds: one.transactionId } }),
    ),
  after,
}))

/** A message with another payload; the old one goes, with its dead letters. */
export const editMessage = doing('post /api/v1/push', (message: MessageRef, payload: unknown, after?: () => void): Action => ({
  title: 'Edit and send again',
  object: message.transactionId,
  verb: 'Send edited message',
  inOrder: true,
  fields: [
    { name: 'payload', label: 'Payload', kind: 'json', initial: JSON.stringify(payload, null, 2), required: true },
    { name: 'remove', label: 'Delete the old message with its dead letters', kind: 'check', initial: true },
  ],
  changes: (form) => {
    const before = JSON.stringify(payload)
    let next = ''
    try {
      next = JSON.stringify(JSON.parse(String(form.payload)))
    } catch {
      return []
    }
    return before === next ? [] : [{ name: 'payload', before: short(before), after: short(next) }]
  },
  effect: (form) => [
    { text: `A new message with this payload is stored at the tail of ${message.queue} / ${message.partition}, for every group.` },
    form.remove ? { kind: 'warn', text: `${message.transactionId} is deleted afterwards.` } : { text: 'The old message stays.' },
  ],
  calls: (form) => {
    const item = { queue: message.queue, partition: message.partition, payload: JSON.parse(String(form.payload)) as never }
    const calls: Call[] = [
      call('post', '/api/v1/push', { body: { items: [item] } }, `queen.queue(${pythonValue(item.queue)}).partition(${pythonValue(item.partition)}).push([{"data": ${pythonValue(item.payload)}}])`),
    ]
    if (form.remove)
      calls.push(call('delete', '/api/v1/messages/{partition}/{transaction}', { path: { partition: message.partitionId, transaction: message.transactionId } }))
    return calls
  },
  done: () => `The edited message is queued in ${message.queue}`,
  after,
}))

const short = (text: string) => (text.length > 120 ? `${text.slice(0, 117)}…` : text)

export interface LetterFilter {
  queue: string
  consumerGroup?: string
  partition?: string
  from?: string
  to?: string
  transactionIds?: string[]
}

const narrowed = (filter: LetterFilter) =>
  [filter.consumerGroup && `group ${groupLabel(filter.consumerGroup)}`, filter.partition && `partition ${filter.partition}`, filter.from && `since ${filter.from}`]
    .filter(Boolean)
    .join(', ')

export const retryLetters = doing('post /api/v1/dlq/retry', (filter: LetterFilter, total: number, after?: () => void): Action => ({
  title: 'Retry dead letters',
  object: `${plural(total, 'dead letter')} of ${filter.queue}`,
  verb: `Retry ${plural(total, 'dead letter')}`,
  effect: () => [
    { text: `${plural(total, 'message')} ${total === 1 ? 'is' : 'are'} stored at the tails of their partitions, those that failed first before the others.` },
    { text: 'The dead letters are removed.' },
    ...(narrowed(filter) ? [{ text: `Only ${narrowed(filter)}.` }] : []),
  ],
  calls: () => [call('post', '/api/v1/dlq/retry', { body: filter })],
  done: ([answer]) => {
    const { retried, remaining } = answer as Schema['Retried']
    return `${plural(retried, 'message')} queued again${remaining ? `; ${plural(remaining, 'dead letter')} left` : ''}`
  },
  after,
}))

export const deleteLetters = doing('delete /api/v1/dlq', (filter: LetterFilter, total: number, after?: () => void): Action => ({
  title: 'Delete dead letters',
  object: `${plural(total, 'dead letter')} of ${filter.queue}`,
  verb: `Delete ${plural(total, 'dead letter')}`,
  danger: true,
  typed: filter.transactionIds ? undefined : filter.queue,
  effect: () => [
    { kind: 'bad', text: `${plural(total, 'dead letter')} with ${total === 1 ? 'its' : 'their'} errors ${total === 1 ? 'is' : 'are'} removed.` },
    { text: 'Their messages stay in their partitions.' },
    ...(narrowed(filter) ? [{ text: `Only ${narrowed(filter)}.` }] : []),
  ],
  calls: () => [{ method: 'DELETE', url: '/api/v1/dlq', body: filter } satisfies Call],
  done: ([answer]) => `${plural((answer as Schema['Purged']).deleted, 'dead letter')} deleted`,
  after,
}))
