/** Archives on Spark. The server runs no Spark: it says what to run. */
import { call, type Schema } from '@/api/client'
import { doing, type Action, type Form } from '@/lib/actions'

const time = (value: unknown) => (value ? new Date(String(value)).toISOString() : undefined)
const body = (form: Form) => ({ archive: String(form.archive), queue: String(form.queue) || undefined, toQueue: String(form.toQueue) || undefined, from: time(form.from), to: time(form.to) })

export const replayArchive = doing('post /api/v1/pipelines/replay', (after: (command: string) => void): Action => ({
  title: 'Replay an archive',
  intro: 'An archive holds messages that a pipeline wrote to Parquet.',
  verb: 'Make the command',
  fields: [
    { name: 'archive', label: 'Archive', kind: 'text', required: true, placeholder: '/data/archive', hint: 'The directory or URL that “queen pipeline archive” wrote to.' },
    { name: 'queue', label: 'Of the queue', kind: 'text', placeholder: 'every queue of the archive' },
    { name: 'toQueue', label: 'Into the queue', kind: 'text', placeholder: 'where they came from' },
    { name: 'from', label: 'Pushed since', kind: 'time' },
    { name: 'to', label: 'Pushed before', kind: 'time' },
  ],
  effect: (form) => [
    { text: `Messages are pushed to ${String(form.toQueue) || 'the queues they came from'}, with the transaction ids they had.` },
    { text: 'Those that are there already are duplicates, and change nothing.' },
    { kind: 'info', text: 'It runs on Spark, on a host that reads the archive: you get the command.' },
  ],
  calls: (form) => [call('post', '/api/v1/pipelines/replay', { body: body(form) })],
  done: () => 'The command is on the page',
  after: ([answer]) => after((answer as Schema['ReplayCommand']).command),
}))
