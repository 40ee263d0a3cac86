/** Where queues and topics live. */
import { call, get, type Schema } from '@/api/client'
import { adminPython } from '@/api/shown'
import { doing, type Action, type Effect } from '@/lib/actions'
import { bytes, plural } from '@/lib/format'
import { queueExists, queueNames } from '@/lib/queues'

/** Moves a queue or a topic to another PostgreSQL while it is used. */
export const moveToShard = doing('post /api/v1/shards/move', (shards: Schema['ShardView'][], queue: string = ''): Action => ({
  title: 'Move to another shard',
  object: queue,
  verb: 'Move',
  fields: [
    {
      name: 'kind',
      label: 'What',
      kind: 'select',
      initial: 'queue',
      options: [
        { value: 'queue', label: 'a queue' },
        { value: 'topic', label: 'a topic' },
      ],
    },
    { name: 'queue', label: 'Queue', kind: 'text', initial: queue, required: true, suggest: queueNames, when: (form) => form.kind === 'queue' },
    { name: 'namespace', label: 'Namespace', kind: 'text', required: true, when: (form) => form.kind === 'topic' },
    { name: 'topic', label: 'Topic', kind: 'text', required: true, when: (form) => form.kind === 'topic' },
    { name: 'to', label: 'To the shard', kind: 'select', initial: String(shards.at(-1)?.shard ?? 0), options: shards.map((one) => ({ value: String(one.shard), label: `${one.shard}: ${one.database}, ${bytes(one.bytes)}` })) },
  ],
  effect: async (form) => {
    const target = shards.find((one) => String(one.shard) === form.to)
    const effects: Effect[] = []
    if (form.kind === 'queue' && form.queue) {
      if (!(await queueExists(String(form.queue)))) return [{ kind: 'bad', text: `There is no queue ${String(form.queue)}.` }]
      const { total } = (await get('/api/v1/status', { query: { queue: String(form.queue) } })).messages
      effects.push({ text: `${plural(total, 'message')} with ids, leases, groups, dead letters and traces are copied.` })
    }
    effects.push({ text: 'Pushes and pops go on meanwhile, and wait for a moment at the end.' })
    if (target && !target.up) effects.push({ kind: 'bad', text: `Shard ${target.shard} is unavailable: it would be refused.` })
    return effects
  },
  calls: (form) => {
    const to = Number(form.to)
    const name = form.kind === 'queue' ? { queue: String(form.queue) } : { namespace: String(form.namespace), topic: String(form.topic) }
    return [call('post', '/api/v1/shards/move', { body: { ...name, to } }, adminPython('move_to_shard', [to], name))]
  },
  done: ([answer]) => {
    const { name, to, moved, running } = answer as Schema['ShardMoved']
    return running ? `${name} is on its way to shard ${to}` : moved ? `${name} lives on shard ${to}` : `${name} was there already`
  },
}))
