/** Maintenance modes of the whole server. */
import { call, get } from '@/api/client'
import { pythonValue } from '@/api/shown'
import { doing, type Action } from '@/lib/actions'
import { perSecond, plural } from '@/lib/format'

export const switchPushes = doing('post /api/v1/system/maintenance', (enabled: boolean): Action => {
  const put = (value: boolean) => call('post', '/api/v1/system/maintenance', { body: { enabled: value } }, `queen.admin.set_maintenance_mode(${pythonValue(value)})`)
  return {
    title: enabled ? 'Switch push maintenance on' : 'Switch push maintenance off',
    object: 'every server of this database',
    verb: enabled ? 'Switch on' : 'Switch off',
    danger: enabled,
    effect: async () => {
      const [overview, state] = await Promise.all([get('/api/v1/resources/overview'), get('/api/v1/system/maintenance')])
      return enabled
        ? [
            { kind: 'warn', text: `Pushes (${perSecond(overview.throughput.ingestedPerSecond)} lately) are kept on disk and answered “buffered”.` },
            { kind: 'warn', text: 'Consumers see none of them until it is switched off. It holds across restarts.' },
          ]
        : [{ text: `${plural(state.bufferedMessages, 'message that waits on disk goes', 'messages that wait on disk go')} to PostgreSQL, in order.` }]
    },
    calls: () => [put(enabled)],
    done: () => `Push maintenance is ${enabled ? 'on' : 'off'}`,
    undo: () => [put(!enabled)],
  }
})

export const switchPops = doing('post /api/v1/system/maintenance/pop', (enabled: boolean): Action => {
  const put = (value: boolean) => call('post', '/api/v1/system/maintenance/pop', { body: { enabled: value } }, `queen.admin.set_pop_maintenance_mode(${pythonValue(value)})`)
  return {
    title: enabled ? 'Switch pop maintenance on' : 'Switch pop maintenance off',
    object: 'every server of this database',
    verb: enabled ? 'Switch on' : 'Switch off',
    danger: enabled,
    effect: async () => {
      const overview = await get('/api/v1/resources/overview')
      return enabled
        ? [
            { kind: 'warn', text: `Consumers are answered that there is nothing; ${plural(overview.messages.pending, 'message waits', 'messages wait')}.` },
            { text: 'What is leased already can be acknowledged. It holds across restarts.' },
          ]
        : [{ text: 'Consumers get messages again at once.' }]
    },
    calls: () => [put(enabled)],
    done: () => `Pop maintenance is ${enabled ? 'on' : 'off'}`,
    undo: () => [put(!enabled)],
  }
})
