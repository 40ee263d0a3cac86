/** What can be done to topics, their items and namespaces. */
import { call, get, type Schema } from '@/api/client'
import { adminPython, pythonValue } from '@/api/shown'
import { doing, type Action, type Field, type Form } from '@/lib/actions'
import { plural } from '@/lib/format'
import { parseJson } from '@/lib/json'

type Counts = Schema['TopicCounts']
type Letter = Schema['TopicDeadLetter']

const key = ({ namespace, topic }: { namespace: string; topic: string }) => `${namespace} / ${topic}`

export const enqueueItem = doing('post /api/v1/topics/enqueue', (namespace: string = '', topic: string = ''): Action => ({
  title: 'Enqueue a test item',
  object: topic && key({ namespace, topic }),
  verb: 'Enqueue item',
  fields: [
    { name: 'namespace', label: 'Namespace', kind: 'text', initial: namespace, required: true, placeholder: 'acme' },
    { name: 'topic', label: 'Topic', kind: 'text', initial: topic, required: true, placeholder: 'thumbnails' },
    { name: 'priority', label: 'Priority', kind: 'number', initial: 0, hint: 'Lower comes first.' },
    { name: 'delay', label: 'Delay', unit: 'seconds', kind: 'number', initial: 0 },
    { name: 'data', label: 'Data', kind: 'json', initial: '{\n  "hello": "world"\n}', required: true },
  ],
  effect: (form) => [{ text: form.delay ? `It is ready in ${form.delay} s.` : 'It is ready at once, for any worker of the topic.' }],
  calls: (form) => {
    const item = {
      namespace: String(form.namespace),
      topic: String(form.topic),
      data: parseJson(String(form.data)) as never,
      priority: Number(form.priority || 0),
      ...(form.delay ? { delay: Number(form.delay) } : {}),
    }
    const { data, priority, delay } = item as typeof item & { delay?: number }
    const built = `${priority ? `priority(${priority}).` : ''}${delay ? `delay(${delay}).` : ''}enqueue([${pythonValue({ data })}])`
    return [call('post', '/api/v1/topics/enqueue', { query: { ids: 'string' }, body: [item] as never }, topicPython(item, built))]
  },
  done: () => 'Item enqueued',
}))

type Options = Counts['options']
const optionFields = (options: Options): Field[] => [
  { name: 'lease_seconds', label: 'Lease', unit: 'seconds', kind: 'number', initial: options.lease_seconds },
  { name: 'max_retries', label: 'Retries', kind: 'number', initial: options.max_retries },
  { name: 'backoff_base_ms', label: 'Backoff', unit: 'ms', kind: 'number', initial: options.backoff_base_ms, hint: 'Doubled with every retry.' },
  { name: 'backoff_cap_ms', label: 'Longest backoff', unit: 'ms', kind: 'number', initial: options.backoff_cap_ms },
  { name: 'ttl_seconds', label: 'Time to live', unit: 'seconds', kind: 'number', initial: options.ttl_seconds ?? '', hint: 'Empty: for ever.' },
  { name: 'at_most_once', label: 'Deliver at most once', kind: 'check', initial: options.at_most_once },
]
const optionsOf = (form: Form): Options => ({
  max_retries: Number(form.max_retries),
  backoff_base_ms: Number(form.backoff_base_ms),
  backoff_cap_ms: Number(form.backoff_cap_ms),
  lease_seconds: Number(form.lease_seconds),
  at_most_once: form.at_most_once === true,
  ttl_seconds: form.ttl_seconds === '' ? null : Number(form.ttl_seconds),
})
const configure = (namespace: string, topic: string, options: Options) =>
  call('post', '/api/v1/topics/configure', { body: { namespace, topic, options: options as never } }, adminPython('configure_topic', [namespace, topic, options]))
const USUAL: Options = { max_retries: 3, backoff_base_ms: 1000, backoff_cap_ms: 300_000, lease_seconds: 30, at_most_once: false, ttl_seconds: null }

export const createTopic = doing('post /api/v1/topics/configure', (namespace: string, after: (namespace: string, topic: string) => void): Action => ({
  title: 'Create a topic',
  intro: 'Topics are also made by the first item that is enqueued.',
  verb: 'Create topic',
  fields: [
    { name: 'namespace', label: 'Namespace', kind: 'text', initial: namespace, required: true, placeholder: 'acme' },
    { name: 'topic', label: 'Topic', kind: 'text', required: true, placeholder: 'thumbnails' },
    ...optionFields(USUAL),
  ],
  effect: async (form) => {
    if (!form.namespace || !form.topic) return [{ text: 'An empty topic.' }]
    const found = await get('/api/v1/topics/counts', { query: { namespace: String(form.namespace), topic: String(form.topic) } })
    return found.length
      ? [{ kind: 'warn', text: `${form.topic} exists already: its options would be replaced, its items stay.` }]
      : [{ text: `The topic ${form.topic} is made, with no items.` }]
  },
  calls: (form) => [configure(String(form.namespace), String(form.topic), optionsOf(form))],
  done: (_, form) => `Topic ${form.topic} is configured`,
  after: (_, form) => after(String(form.namespace), String(form.topic)),
}))

export const configureTopic = doing('post /api/v1/topics/configure', (counts: Counts): Action => {
  const { namespace, topic, options } = counts
  return {
    title: 'Change options',
    object: key(counts),
    verb: 'Save changes',
    fields: optionFields(options),
    changes: (form) =>
      Object.entries(optionsOf(form))
        .filter(([name, value]) => value !== options[name as keyof typeof options])
        .map(([name, value]) => ({ name, before: String(options[name as keyof typeof options] ?? '–'), after: String(value ?? '–') })),
    calls: (form) => [configure(namespace, topic, optionsOf(form))],
    done: () => `Options of ${topic} are changed`,
    undo: () => [configure(namespace, topic, options)],
  }
})

/** No item of a topic is leased until it is resumed. */
export const pauseTopic = doing('post /api/v1/topics/pause', (counts: Counts, paused: boolean): Action => {
  const { namespace, topic } = counts
  const put = (now: boolean) =>
    call('post', now ? '/api/v1/topics/pause' : '/api/v1/topics/resume', { body: { namespace, topic } }, `queen.admin.${now ? 'pause' : 'resume'}_topic(${pythonValue(namespace)}, ${pythonValue(topic)})`)
  return {
    title: paused ? 'Pause the topic' : 'Resume the topic',
    object: key(counts),
    verb: paused ? 'Pause topic' : 'Resume topic',
    effect: () =>
      paused
        ? [
            { kind: 'warn', text: 'Workers get none of its items; what is enqueued waits.' },
            { text: `${plural(counts.leased, 'leased item')} can be acknowledged.` },
          ]
        : [{ text: `${plural(counts.ready, 'ready item')} can be leased again.` }],
    calls: () => [put(paused)],
    done: () => `${topic} is ${paused ? 'paused' : 'resumed'}`,
    undo: () => [put(!paused)],
  }
})

export const purgeTopic = doing('post /api/v1/topics/purge', (counts: Counts): Action => {
  const { namespace, topic } = counts
  return {
    title: 'Purge the topic',
    object: key(counts),
    verb: 'Remove all items',
    danger: true,
    typed: topic,
    effect: () => [
      { kind: 'bad', text: `${plural(counts.ready + counts.delayed + counts.leased, 'item')} ${counts.ready + counts.delayed + counts.leased === 1 ? 'is' : 'are'} removed: ${counts.ready} ready, ${counts.delayed} delayed, ${counts.leased} leased.` },
    ],
    calls: () => [call('post', '/api/v1/topics/purge', { body: { namespace, topic } })],
    done: ([answer]) => `${plural((answer as Schema['PurgedTopic']).removed, 'item')} removed`,
  }
})

export const deleteTopic = doing('delete /api/v1/topics', (counts: Counts, after?: () => void): Action => {
  const { namespace, topic } = counts
  return {
    title: 'Delete the topic',
    object: key(counts),
    verb: 'Delete topic',
    danger: true,
    typed: topic,
    effect: () => [{ kind: 'bad', text: `It goes with ${plural(counts.ready + counts.delayed + counts.leased, 'item')} and ${plural(counts.dead, 'dead letter')}, and with its options.` }],
    calls: () => [call('delete', '/api/v1/topics', { query: { namespace, topic } })],
    done: () => `Topic ${topic} is deleted`,
    after,
  }
})

export const setQuota = doing('put /api/v1/topics/quotas', (namespace: string, current: number | null): Action => {
  const put = (value: number | null, name = namespace) => call('put', '/api/v1/topics/quotas', { body: { namespace: name, per_minute: value } }, adminPython('set_quota', [name, value]))
  return {
    title: 'Set the quota',
    object: namespace,
    verb: 'Set quota',
    fields: [
      ...(namespace ? [] : [{ name: 'namespace', label: 'Namespace', kind: 'text' as const, required: true }]),
      { name: 'quota', label: 'Items per minute', kind: 'number', initial: current ?? '', hint: 'Empty: as NAMESPACE_QUOTAS says. 0: nothing may be enqueued.' },
    ],
    changes: (form) => {
      const next = form.quota === '' ? null : Number(form.quota)
      return next === current ? [] : [{ name: 'per minute', before: current === null ? 'as set' : String(current), after: next === null ? 'as set' : String(next) }]
    },
    calls: (form) => {
      const value = form.quota === '' ? null : Number(form.quota)
      return [put(value, namespace || String(form.namespace))]
    },
    done: (_, form) => `Quota of ${namespace || String(form.namespace)} is set`,
    undo: () => (namespace ? [put(current)] : undefined),
  }
})

export const setMode = doing('put /api/v1/topics/modes', (namespace: string, current: 'sync' | 'buffered' | null): Action => {
  const put = (mode: 'sync' | 'buffered' | null) => call('put', '/api/v1/topics/modes', { body: { namespace, mode } }, adminPython('set_write_mode', [namespace, mode]))
  return {
    title: 'Set the write mode',
    object: namespace,
    verb: 'Set mode',
    fields: [
      {
        name: 'mode',
        label: 'Mode',
        kind: 'select',
        initial: current ?? '',
        options: [
          { value: '', label: 'as the server is set' },
          { value: 'sync', label: 'sync: stored in PostgreSQL before it is answered' },
          { value: 'buffered', label: 'buffered: kept on disk, stored soon after' },
        ],
      },
    ],
    changes: (form) => (form.mode === (current ?? '') ? [] : [{ name: 'mode', before: current ?? 'as set', after: String(form.mode) || 'as set' }]),
    calls: (form) => [put((form.mode || null) as 'sync' | 'buffered' | null)],
    done: () => `Write mode of ${namespace} is set`,
    undo: () => [put(current)],
  }
})

const refs = (letters: Letter[]) => letters.map(({ id, namespace, topic }) => ({ id, namespace, topic }))

export const retryTopicLetters = doing('post /api/v1/topics/dlq/retry', (letters: Letter[], after?: () => void): Action => ({
  title: 'Retry dead letters',
  object: `${plural(letters.length, 'dead letter')} of ${letters[0]!.topic}`,
  verb: `Retry ${plural(letters.length, 'dead letter')}`,
  effect: () => [{ text: letters.length === 1 ? 'It is ready again, with all its retries.' : 'They are ready again, with all their retries.' }],
  calls: () => [call('post', '/api/v1/topics/dlq/retry', { query: { ids: 'string' }, body: refs(letters) as never }, topicPython(letters[0]!, 'dlq().retry()'))],
  done: () => `${plural(letters.length, 'item')} ready again`,
  after,
}))

export const deleteTopicLetters = doing('post /api/v1/topics/dlq/delete', (letters: Letter[], after?: () => void): Action => ({
  title: 'Delete dead letters',
  object: `${plural(letters.length, 'dead letter')} of ${letters[0]!.topic}`,
  verb: `Delete ${plural(letters.length, 'dead letter')}`,
  danger: true,
  effect: () => [{ kind: 'bad', text: letters.length === 1 ? 'It is removed with its data.' : 'They are removed with their data.' }],
  calls: () => [call('post', '/api/v1/topics/dlq/delete', { query: { ids: 'string' }, body: refs(letters) as never })],
  done: () => `${plural(letters.length, 'dead letter')} deleted`,
  after,
}))

/** A page is asked for and dealt with, until as many as there were are done: those that fail again meanwhile come last, and stay. */
function allLetters({ namespace, topic, dead }: Counts, act: 'retry' | 'delete', done: string) {
  const PAGE = 1000
  let left = dead
  const page = () =>
    call('get', '/api/v1/topics/dlq', { query: { namespace, topic, limit: Math.min(PAGE, left), ids: 'string' } }, topicPython({ namespace, topic }, `dlq().limit(${Math.min(PAGE, left)}).${act}()`))
  const settle = (letters: Letter[]) => call('post', `/api/v1/topics/dlq/${act}`, { query: { ids: 'string' }, body: refs(letters) as never })
  type Answer = Letter[] | Schema['Settled'][]
  const settled = (answer: Answer) => ('success' in (answer[0] ?? {}) ? (answer as Schema['Settled'][]).filter((one) => one.success).length : 0)
  return {
    object: key({ namespace, topic }),
    calls: () => [page()],
    byHand: (language: string) => (language === 'curl' ? `and what it lists to POST /api/v1/topics/dlq/${act}; again until nothing is listed` : dead > PAGE ? 'again until it returns 0' : undefined),
    next: (answer: Answer) => {
      if (!answer.length) return undefined
      if (!('success' in answer[0]!)) return settle(answer as Letter[])
      left -= answer.length
      return left > 0 ? page() : undefined
    },
    progress: { of: settled, total: () => dead },
    done: (answers: Answer[]) => `${plural(answers.reduce((sum, one) => sum + settled(one), 0), 'dead letter')} ${done}`,
  }
}

export const retryAllTopicLetters = doing('post /api/v1/topics/dlq/retry', (counts: Counts): Action => ({
  ...allLetters(counts, 'retry', 'ready again'),
  title: 'Retry all dead letters',
  verb: `Retry ${plural(counts.dead, 'dead letter')}`,
  effect: () => [{ text: `${plural(counts.dead, 'dead letter')} ${counts.dead === 1 ? 'is' : 'are'} ready again, with all retries, those that failed first before the others.` }],
}))

export const deleteAllTopicLetters = doing('post /api/v1/topics/dlq/delete', (counts: Counts): Action => ({
  ...allLetters(counts, 'delete', 'deleted'),
  title: 'Delete all dead letters',
  verb: `Delete ${plural(counts.dead, 'dead letter')}`,
  danger: true,
  typed: counts.topic,
  effect: () => [{ kind: 'bad', text: `${plural(counts.dead, 'dead letter')} ${counts.dead === 1 ? 'is' : 'are'} removed with ${counts.dead === 1 ? 'its' : 'their'} data.` }],
}))

export const releaseItem = doing('post /api/v1/topics/release', (item: Schema['TopicItem']): Action => {
  const { id, namespace, topic, lease_owner } = item
  return {
    title: 'Release a lease',
    object: `item ${id}`,
    verb: 'Release lease',
    effect: () => [
      { text: 'It is ready as before, for any worker, and does not count as failed.' },
      { kind: 'warn', text: 'The worker that has it now may finish it, too: it can be done twice.' },
    ],
    calls: () => [call('post', '/api/v1/topics/release', { query: { ids: 'string' }, body: [{ id, namespace, topic, lease_owner }] as never })],
    done: () => `Item ${id} is ready again`,
  }
})

const topicPython = (one: { namespace: string; topic: string }, rest: string) => `queen.topic(${pythonValue(one.namespace)}, ${pythonValue(one.topic)}).${rest}`
