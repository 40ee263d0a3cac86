/** What can be done to messages and dead letters, one or many. */
import { call, send, type Call, type Schema } from '@/api/client'
import { adminPython, pythonValue } from '@/api/shown'
import { doing, type Action, type Effect, type Field, type Form } from '@/lib/actions'
import { groupLabel, plural } from '@/lib/format'
import { editable, parseJson } from '@/lib/json'
import type { MessageFilter } from '@/lib/search'

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

const CHUNK = 1000

/** Calls for these messages: one for a single message, and as few as can be for many. */
function each(messages: MessageRef[], single: (one: MessageRef) => Call, many: (queue: string, refs: Schema['MessageRef'][]) => Call): Call[] {
  if (messages.length === 1) return [single(messages[0]!)]
  return queuesOf(messages).flatMap((queue) => {
    const refs = messages.filter((one) => one.queue === queue).map(({ partitionId, transactionId }) => ({ partitionId, transactionId }))
    return Array.from({ length: Math.ceil(refs.length / CHUNK) }, (_, part) => many(queue, refs.slice(part * CHUNK, (part + 1) * CHUNK)))
  })
}
/** How many messages answers speak of: those about many say so. */
const sum = (answers: unknown[]) => answers.reduce<number>((all, one) => all + ((one as Partial<Schema['BulkDone']>).done ?? 1), 0)
const ofOne = ({ partitionId, transactionId }: MessageRef) => ({ partition: partitionId, transaction: transactionId })

export const retryMessages = doing('post /api/v1/messages/{partition}/{transaction}/retry', (messages: MessageRef[], after?: () => void): Action => ({
  title: 'Retry',
  object: named(messages),
  verb: messages.length === 1 ? 'Retry message' : `Retry ${plural(messages.length, 'message')}`,
  effect: () => [
    { text: `A copy of ${messages.length === 1 ? 'it' : 'each'} is stored at the tail of its partition, for every group.` },
    { text: `${messages.length === 1 ? 'Its' : 'Their'} dead letters are removed.` },
    places(messages),
  ],
  calls: () =>
    each(
      messages,
      (one) => call('post', '/api/v1/messages/{partition}/{transaction}/retry', { path: ofOne(one) }, adminPython('retry_message', [one.partitionId, one.transactionId])),
      (queue, refs) => call('post', '/api/v1/messages/retry', { body: { queue, messages: refs } }, adminPython('retry_messages', [queue], { messages: refs })),
    ),
  done: (answers) => `${plural(sum(answers), 'message')} queued again`,
  undo: (answers) => {
    const retried = answers as Schema['MessageRetried'][]
    if (!retried.every((one) => one.newTransactionId && !one.deadLettersRemoved)) return undefined
    return retried.map((one) => call('delete', '/api/v1/messages/{partition}/{transaction}', { path: { partition: one.partitionId, transaction: one.newTransactionId! } }))
  },
  after,
}))

export const deleteMessages = doing('delete /api/v1/messages/{partition}/{transaction}', (messages: MessageRef[], after?: () => void): Action => ({
  title: messages.length === 1 ? 'Delete a message' : 'Delete messages',
  object: named(messages),
  verb: messages.length === 1 ? 'Delete message' : `Delete ${plural(messages.length, 'message')}`,
  danger: true,
  effect: () => [
    { kind: 'bad', text: `${messages.length === 1 ? 'It is' : 'They are'} removed with dead letters and traces, and cannot be brought back.` },
    { kind: 'warn', text: `A consumer that has leased ${messages.length === 1 ? 'it' : 'them'} keeps what was delivered.` },
    places(messages),
  ],
  calls: () =>
    each(
      messages,
      (one) => call('delete', '/api/v1/messages/{partition}/{transaction}', { path: ofOne(one) }, adminPython('delete_message', [one.partitionId, one.transactionId])),
      (queue, refs) => call('post', '/api/v1/messages/delete', { body: { queue, messages: refs } }, adminPython('delete_messages', [queue], { messages: refs })),
    ),
  done: (answers) => `${plural(sum(answers), 'message')} deleted`,
  after,
}))

const deadLetterFields = (groups: string[]): Field[] => [
  { name: 'group', label: 'For the group', kind: 'select', initial: groups[0] ?? '', options: [...groups.map((one) => ({ value: one, label: groupLabel(one) })), ...(groups.includes('__QUEUE_MODE__') ? [] : [{ value: '', label: 'queue mode' }])] },
  { name: 'error', label: 'Reason', kind: 'text', initial: 'moved by hand', required: true },
]
const given = (form: Form) => ({ consumerGroup: String(form.group) || null, error: String(form.error) })

export const moveToDeadLetters = doing('post /api/v1/messages/{partition}/{transaction}/dlq', (messages: MessageRef[], groups: string[], after?: () => void): Action => ({
  title: 'Move to dead letters',
  object: named(messages),
  verb: 'Make dead letter',
  fields: deadLetterFields(groups),
  effect: () => [
    { text: `A dead letter is made of ${messages.length === 1 ? 'it' : 'each'}; the message itself stays in its partition.` },
    { kind: 'warn', text: messages.length === 1 ? 'If it is pending it is still delivered.' : 'Those that are pending are still delivered.' },
    places(messages),
  ],
  calls: (form) =>
    each(
      messages,
      (one) => call('post', '/api/v1/messages/{partition}/{transaction}/dlq', { path: ofOne(one), body: given(form) }, adminPython('move_message_to_dlq', [one.partitionId, one.transactionId], given(form))),
      (queue, refs) => call('post', '/api/v1/messages/dlq', { body: { queue, messages: refs, ...given(form) } }, adminPython('dead_letter_messages', [queue], { messages: refs, ...given(form) })),
    ),
  done: (answers) => `${plural(sum(answers), 'dead letter')} made`,
  undo: (_, form) => lettersOf(messages.map((one) => ({ ...one, consumerGroup: String(form.group) || '__QUEUE_MODE__' }))).map((body): Call<any> => ({ method: 'DELETE', url: '/api/v1/dlq', body })),
  after,
}))

const BULK = {
  retry: { method: 'retry_messages', title: 'Retry all that match', verb: 'Retry', danger: false, effect: 'A copy of each is stored at the tail of its partition, for every group.', done: 'queued again' },
  dlq: { method: 'dead_letter_messages', title: 'Move all that match to dead letters', verb: 'Dead-letter', danger: false, effect: 'A dead letter is made of each; the messages stay in their partitions.', done: 'dead-lettered' },
  delete: { method: 'delete_messages', title: 'Delete all that match', verb: 'Delete', danger: true, effect: 'They are removed with dead letters and traces, and cannot be brought back.', done: 'deleted' },
} as const
/** So many are counted beforehand; of more it is said that there are more. */
const MOST_COUNTED = 100_000
const AT_A_TIME = 10_000

async function matched(filter: MessageFilter): Promise<{ count: number; more: boolean }> {
  const { queue, ...rest } = filter
  let count = 0
  let scanned = 0
  let cursor: string | null = null
  do {
    const found: Schema['BulkDone'] = await send(call('post', '/api/v1/messages/delete', { body: { queue, filter: rest, limit: AT_A_TIME, cursor, dryRun: true } }))
    count += found.matched
    scanned += found.scanned
    cursor = found.cursor
  } while (cursor && scanned < MOST_COUNTED)
  return { count, more: cursor !== null }
}

/** Acts on everything that a filter finds, a part at a time, with progress. */
function bulk(kind: keyof typeof BULK) {
  return doing(`post /api/v1/messages/${kind}`, (filter: MessageFilter, groups: string[]): Action => {
    const { queue, ...rest } = filter
    const words = BULK[kind]
    let expected: number | undefined
    const step = (form: Form, cursor: string | null) => {
      const about = { filter: rest, limit: CHUNK, cursor, ...(kind === 'dlq' ? given(form) : {}) }
      return call('post', `/api/v1/messages/${kind}`, { body: { queue, ...about } }, adminPython(words.method, [queue], about))
    }
    const narrow = Object.entries(rest).filter(([, value]) => value).map(([name, value]) => `${name} ${String(value)}`)
    return {
      title: words.title,
      object: queue,
      verb: `${words.verb} all`,
      danger: words.danger,
      typed: words.danger ? queue : undefined,
      fields: kind === 'dlq' ? deadLetterFields(groups) : [],
      effect: async () => {
        const { count, more } = await matched(filter)
        expected = more ? undefined : count
        return [
          { kind: words.danger ? 'bad' : 'warn', text: `${more ? 'More than ' : ''}${plural(count, 'message')} ${count === 1 ? 'matches' : 'match'}${narrow.length ? ` (${narrow.join(', ')})` : ''}.` },
          { text: words.effect },
          ...(kind === 'retry' ? [{ text: 'What is stored meanwhile is not retried again.' }] : []),
        ]
      },
      calls: (form) => [step(form, null)],
      byHand: () => (expected === undefined || expected > CHUNK ? 'again with the cursor of its answer, until that is null' : undefined),
      next: (answer: Schema['BulkDone'], form) => (answer.cursor ? step(form, answer.cursor) : undefined),
      progress: { of: (answer: Schema['BulkDone']) => answer.done, total: () => expected },
      done: (answers) => {
        const failed = (answers as Schema['BulkDone'][]).reduce((all, one) => all + one.failed, 0)
        return `${plural(sum(answers), 'message')} ${words.done}${failed ? `, ${failed} failed` : ''}`
      },
    }
  })
}
export const retryMatching = bulk('retry')
export const deadLetterMatching = bulk('dlq')
export const deleteMatching = bulk('delete')

/** A message with another payload; the old one goes, with its dead letters. */
export const editMessage = doing('post /api/v1/push', (message: MessageRef, payload: unknown, after?: () => void): Action => ({
  title: 'Edit and send again',
  object: message.transactionId,
  verb: 'Send edited message',
  inOrder: true,
  fields: [
    { name: 'payload', label: 'Payload', kind: 'json', initial: editable(payload), required: true },
    { name: 'remove', label: 'Delete the old message with its dead letters', kind: 'check', initial: true },
  ],
  changes: (form) => {
    const before = JSON.stringify(payload)
    let next = ''
    try {
      next = JSON.stringify(parseJson(String(form.payload)))
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
    const item = { queue: message.queue, partition: message.partition, payload: parseJson(String(form.payload)) as never }
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

/** Transaction ids are those of a partition, and each group has dead letters of its own. */
export function lettersOf(letters: { queue: string; consumerGroup: string; partition: string; transactionId: string }[]): LetterFilter[] {
  const found = new Map<string, LetterFilter>()
  for (const { queue, consumerGroup, partition, transactionId } of letters) {
    const place = JSON.stringify([queue, consumerGroup, partition])
    const known = found.get(place)
    if (known) known.transactionIds!.push(transactionId)
    else found.set(place, { queue, consumerGroup, partition, transactionIds: [transactionId] })
  }
  return [...found.values()]
}

const narrowed = (filter: LetterFilter) =>
  [filter.consumerGroup && `group ${groupLabel(filter.consumerGroup)}`, filter.partition && `partition ${filter.partition}`, filter.from && `since ${filter.from}`]
    .filter(Boolean)
    .join(', ')
const only = ([first, ...others]: LetterFilter[]): Effect[] => (!others.length && narrowed(first!) ? [{ text: `Only ${narrowed(first!)}.` }] : [])

/** One filter, or those of letters that were picked, of one queue. */
export const retryLetters = doing('post /api/v1/dlq/retry', (filters: LetterFilter[], total: number, after?: () => void): Action => {
  const { queue } = filters[0]!
  // Those that fail again meanwhile are dead letters again, and not retried once more.
  let left = total
  const part = ({ queue: of, ...rest }: LetterFilter) => call('post', '/api/v1/dlq/retry', { body: { queue: of, ...rest, limit: CHUNK } }, adminPython('retry_dead_letters', [of], { ...rest, limit: CHUNK }))
  return {
    title: 'Retry dead letters',
    object: `${plural(total, 'dead letter')} of ${queue}`,
    verb: `Retry ${plural(total, 'dead letter')}`,
    effect: () => [
      { text: total === 1 ? '1 message is stored at the tail of its partition.' : `${plural(total, 'message')} are stored at the tails of their partitions, those that failed first before the others.` },
      { text: total === 1 ? 'The dead letter is removed.' : 'The dead letters are removed.' },
      ...only(filters),
    ],
    calls: () => filters.map(part),
    byHand: () => (total > CHUNK ? 'again until nothing is remaining' : undefined),
    next: ({ remaining, deadLettersRemoved }: Schema['Retried']) => {
      left -= deadLettersRemoved
      return filters.length === 1 && remaining && deadLettersRemoved && left > 0 ? part(filters[0]!) : undefined
    },
    progress: { of: (answer: Schema['Retried']) => answer.deadLettersRemoved, total: () => total },
    done: (answers) => {
      const parts = answers as Schema['Retried'][]
      const remaining = filters.length === 1 ? parts.at(-1)!.remaining : 0
      return `${plural(parts.reduce((sum, one) => sum + one.retried, 0), 'message')} queued again${remaining ? `; ${plural(remaining, 'dead letter')} left` : ''}`
    },
    after,
  }
})

export const deleteLetters = doing('delete /api/v1/dlq', (filters: LetterFilter[], total: number, after?: () => void): Action => ({
  title: 'Delete dead letters',
  object: `${plural(total, 'dead letter')} of ${filters[0]!.queue}`,
  verb: `Delete ${plural(total, 'dead letter')}`,
  danger: true,
  typed: filters[0]!.transactionIds ? undefined : filters[0]!.queue,
  effect: () => [
    { kind: 'bad', text: `${plural(total, 'dead letter')} with ${total === 1 ? 'its' : 'their'} errors ${total === 1 ? 'is' : 'are'} removed.` },
    { text: total === 1 ? 'Its message stays in its partition.' : 'Their messages stay in their partitions.' },
    ...only(filters),
  ],
  calls: () => filters.map(({ queue, ...rest }): Call => ({ method: 'DELETE', url: '/api/v1/dlq', body: { queue, ...rest }, python: adminPython('purge_dead_letters', [queue], rest) })),
  done: (answers) => `${plural((answers as Schema['Purged'][]).reduce((sum, one) => sum + one.deleted, 0), 'dead letter')} deleted`,
  after,
}))
