/** What can be done to keys, locks, timers and ephemeral queues. */
import { call, type Schema } from '@/api/client'
import { pythonValue } from '@/api/shown'
import { doing, type Action } from '@/lib/actions'
import { absolute, bytes, duration, plural } from '@/lib/format'
import { editable, parseJson } from '@/lib/json'

type Key = Schema['KvListed'] | Schema['KvRow']
type Ephemeral = Schema['EphemeralQueue']

const keysPython = (namespace: string, rest: string) => `queen.kv(${pythonValue(namespace)}).${rest}`
const ephemeralPython = (queue: string, rest: string) => `queen.ephemeral(${pythonValue(queue)}).${rest}`
const seconds = (iso: string) => Math.max(1, Math.round((Date.parse(iso) - Date.now()) / 1000))

function put(namespace: string, key: string, value: unknown, expires: string | number | null, expect: number) {
  const ttl = typeof expires === 'string' ? seconds(expires) : expires
  const operation = { op: 'put' as const, ns: namespace, key, value, expect, ...(ttl === null ? { forever: true } : { ttlSeconds: ttl }) }
  const python = keysPython(namespace, `put(${pythonValue(key)}, ${pythonValue(value)}, ${ttl === null ? '' : `ttl=${ttl}, `}expect=${expect})`)
  return call('post', '/api/v1/kv', { body: { operations: [operation as never] } }, python)
}
const remove = (namespace: string, key: string, expect: number) =>
  call('post', '/api/v1/kv', { body: { operations: [{ op: 'delete', ns: namespace, key, expect }] } }, keysPython(namespace, `delete(${pythonValue(key)}, expect=${expect})`))

const REASONS: Partial<Record<string, string>> = {
  absent: 'The key does not exist any more.',
  exists: 'There is such a key already: open it to change it.',
  version: 'The key was written meanwhile: look at it again.',
}
const notApplied = ({ results: [result] }: Schema['KvAnswer']) => (result!.applied ? undefined : (REASONS[result!.reason ?? ''] ?? 'Nothing was written.'))

/** A key that is new, or has another value from now on. */
export const writeKey = doing('post /api/v1/kv', (namespace: string = '', entry?: Schema['KvRow']): Action => {
  const space = (form: Record<string, unknown>) => namespace || String(form.namespace)
  const name = (form: Record<string, unknown>) => entry?.key ?? String(form.key)
  return {
    title: entry ? 'Change the value' : 'Write a key',
    object: entry ? `${namespace} / ${entry.key}` : namespace,
    verb: entry ? 'Save value' : 'Write key',
    fields: [
      ...(namespace ? [] : [{ name: 'namespace', label: 'Namespace', kind: 'text' as const, required: true, placeholder: 'orders', hint: 'It belongs to the queue of its name.' }]),
      ...(entry ? [] : [{ name: 'key', label: 'Key', kind: 'text' as const, required: true, placeholder: 'order-7' }]),
      { name: 'value', label: 'Value', kind: 'json', initial: entry ? editable(entry.value) : '{\n  "state": "held"\n}', required: true },
      { name: 'ttl', label: 'Expires after', unit: 'seconds', kind: 'number', initial: entry?.expiresAt ? seconds(entry.expiresAt) : '', hint: 'Empty: never.' },
    ],
    changes: entry ? (form) => (String(form.value) === editable(entry.value) ? [] : [{ name: 'value', before: JSON.stringify(entry.value), after: compactJson(String(form.value)) }]) : undefined,
    effect: (form) => [
      { text: entry ? `It is written only over version ${entry.version}, which you see.` : 'It is written only if there is no such key.' },
      { text: form.ttl ? `It expires ${duration(Number(form.ttl))} later.` : 'It does not expire.' },
    ],
    calls: (form) => [put(space(form), name(form), parseJson(String(form.value)), form.ttl ? Number(form.ttl) : null, entry?.version ?? 0)],
    refused: notApplied,
    done: (_, form) => `Key ${name(form)} is written`,
    undo: (answers, form) => {
      const version = (answers[0] as Schema['KvAnswer']).results[0]!.version!
      return [entry ? put(namespace, entry.key, entry.value, entry.expiresAt, version) : remove(space(form), name(form), version)]
    },
  }
})
const compactJson = (text: string) => {
  try {
    return JSON.stringify(parseJson(text))
  } catch {
    return text
  }
}

/** `value` is put back by undoing; unknown where it is too large for a list. */
export const deleteKey = doing('post /api/v1/kv', (namespace: string, entry: Key, after?: () => void): Action => ({
  title: 'Delete the key',
  object: `${namespace} / ${entry.key}`,
  verb: 'Delete key',
  danger: true,
  effect: () => [
    { kind: 'bad', text: 'Consumers that read it find nothing from then on.' },
    { text: `It is deleted only if it still has version ${entry.version}, which you see.` },
  ],
  calls: () => [remove(namespace, entry.key, entry.version)],
  refused: notApplied,
  done: () => `Key ${entry.key} is deleted`,
  undo: () => (entry.value === undefined ? undefined : [put(namespace, entry.key, entry.value, entry.expiresAt, 0)]),
  after,
}))

export const releaseLock = doing('post /api/v1/locks', (lock: Schema['HeldLock']): Action => {
  const { name, slot, token, owner } = lock
  return {
    title: 'Release the lock',
    object: slot ? `${name}, permit ${slot}` : name,
    verb: 'Release lock',
    danger: true,
    typed: name,
    effect: () => [
      { kind: 'warn', text: `${owner} holds it${lock.expiresAt ? ` until ${absolute(lock.expiresAt)}` : ''} and is not told: it may work on while another holder begins.` },
      { text: 'Transactions that carry its guard fail from then on. If it was renewed meanwhile, nothing happens.' },
    ],
    calls: () => [call('post', '/api/v1/locks', { body: { operations: [{ op: 'release', name, token, slot }] } })],
    refused: ({ results: [result] }: Schema['LockAnswer']) => (result!.released ? undefined : 'It was renewed or released meanwhile: look at it again.'),
    done: () => `${slot ? `Permit ${slot} of lock` : 'Lock'} ${name} is free`,
  }
})

export const cancelTimer = doing('delete /api/v1/timers/{queue}/{timer}', (queue: string, timerKey: string, deliverAt: string, after?: () => void): Action => ({
  title: 'Cancel the timer',
  object: `${timerKey} of ${queue}`,
  verb: 'Cancel timer',
  danger: true,
  effect: () => [{ kind: 'bad', text: `Nothing is pushed to ${queue} at ${absolute(deliverAt)}. Its payload is gone.` }],
  calls: () => [call('delete', '/api/v1/timers/{queue}/{timer}', { path: { queue, timer: timerKey } }, `queen.timers(${pythonValue(queue)}).cancel(${pythonValue(timerKey)})`)],
  refused: ({ status }: Schema['TimerResult']) => (status === 'absent' ? 'It is not pending any more: it has fired, or was cancelled.' : undefined),
  done: () => `Timer ${timerKey} is cancelled`,
  after,
}))

export const pushEphemeral = doing('post /api/v1/ephemeral/push', (queue: string = ''): Action => ({
  title: 'Push to an ephemeral queue',
  object: queue,
  verb: 'Push message',
  fields: [
    { name: 'queue', label: 'Queue', kind: 'text', initial: queue, required: true, placeholder: 'presence' },
    { name: 'partition', label: 'Partition', kind: 'text', initial: 'Default', required: true },
    { name: 'payload', label: 'Payload', kind: 'json', initial: '{\n  "user": "ada"\n}', required: true },
  ],
  effect: () => [{ text: 'Every group of the queue gets it. It is lost when PostgreSQL crashes.' }],
  calls: (form) => {
    const [name, partition, payload] = [String(form.queue), String(form.partition), parseJson(String(form.payload)) as unknown]
    const python = ephemeralPython(name, `push([${pythonValue(payload)}], partition=${pythonValue(partition)})`)
    return [call('post', '/api/v1/ephemeral/push', { body: { queue: name, partition, messages: [{ payload: payload as never }] } }, python)]
  },
  done: (_, form) => `1 message pushed to ${String(form.queue)}`,
}))

export const configureEphemeral = doing('post /api/v1/ephemeral/configure', (one: Ephemeral): Action => {
  const { queue, options, declared } = one
  const send = (wanted: Record<string, unknown>) =>
    call('post', '/api/v1/ephemeral/configure', { body: { queue, options: wanted as never } }, ephemeralPython(queue, `configure(**${pythonValue(wanted)})`))
  const read = (form: Record<string, unknown>) => ({
    ...options,
    maxLength: Number(form.maxLength),
    maxBytes: Number(form.maxBytes),
    policy: form.policy as 'reject' | 'dropOldest',
    ttlSeconds: Number(form.ttlSeconds),
    leaseSeconds: Number(form.leaseSeconds),
    retryLimit: Number(form.retryLimit),
  })
  return {
    title: declared ? 'Change options' : 'Declare the queue',
    object: queue,
    verb: 'Save changes',
    intro: declared ? undefined : 'It was made by a push and is forgotten an hour after its last use; once declared it stays.',
    fields: [
      { name: 'maxLength', label: 'Most messages', kind: 'number', initial: options.maxLength },
      { name: 'maxBytes', label: 'Most bytes', kind: 'number', initial: options.maxBytes },
      {
        name: 'policy',
        label: 'When it is full',
        kind: 'select',
        initial: options.policy,
        options: [
          { value: 'reject', label: 'refuse the push' },
          { value: 'dropOldest', label: 'drop the oldest messages' },
        ],
      },
      { name: 'ttlSeconds', label: 'Time to live', unit: 'seconds', kind: 'number', initial: options.ttlSeconds },
      { name: 'leaseSeconds', label: 'Lease', unit: 'seconds', kind: 'number', initial: options.leaseSeconds },
      { name: 'retryLimit', label: 'Retries', kind: 'number', initial: options.retryLimit },
    ],
    changes: (form) => {
      const wanted = read(form)
      const names = ['maxLength', 'maxBytes', 'policy', 'ttlSeconds', 'leaseSeconds', 'retryLimit'] as const
      const changed = names.filter((name) => wanted[name] !== options[name]).map((name) => ({ name, before: String(options[name]), after: String(wanted[name]) }))
      return declared ? changed : [{ name: 'declared', before: 'no', after: 'yes' }, ...changed]
    },
    calls: (form) => [send(read(form))],
    done: () => `Options of ${queue} are changed`,
    undo: () => (declared ? [send(options)] : undefined),
  }
})

export const resetEphemeral = doing('post /api/v1/ephemeral/reset', (one: Ephemeral): Action => ({
  title: 'Drop all messages',
  object: one.queue,
  verb: 'Drop messages',
  danger: true,
  typed: one.queue,
  effect: () => [{ kind: 'bad', text: `${plural(one.length, 'message')} (${bytes(one.bytes)}) ${one.length === 1 ? 'goes' : 'go'}, with every lease and position. Its options stay.` }],
  calls: () => [call('post', '/api/v1/ephemeral/reset', { body: { queue: one.queue } }, ephemeralPython(one.queue, 'reset()'))],
  done: ([answer]) => `${plural((answer as Schema['EphemeralReset']).dropped, 'message')} dropped`,
}))

export const deleteEphemeral = doing('delete /api/v1/ephemeral/queue/{queue}', (one: Ephemeral, after?: () => void): Action => ({
  title: 'Delete the ephemeral queue',
  object: one.queue,
  verb: 'Delete queue',
  danger: true,
  typed: one.queue,
  effect: () => [{ kind: 'bad', text: `It goes with ${plural(one.length, 'message')}, its groups and its options. The next push makes a new one.` }],
  calls: () => [call('delete', '/api/v1/ephemeral/queue/{queue}', { path: { queue: one.queue } }, ephemeralPython(one.queue, 'delete()'))],
  done: () => `Ephemeral queue ${one.queue} is deleted`,
  after,
}))
