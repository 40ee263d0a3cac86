/** Copying everything to another PostgreSQL. */
import { call, type Call, type Schema } from '@/api/client'
import { adminPython } from '@/api/shown'
import { doing, type Action } from '@/lib/actions'

/** What is shown of a call with a password. */
function hidden<A>(one: Call<A>, method: string): Call<A> {
  const shown = { ...(one.body as Record<string, unknown>), password: '…' }
  return { ...one, shown, python: adminPython(method, [], shown) }
}

export const testing = (body: Schema['MigrationTarget']) => hidden(call('post', '/api/v1/migration/test-connection', { body }), 'test_migration_target')
export const validating = (body: Schema['MigrationTarget']) => hidden(call('post', '/api/v1/migration/validate', { body }), 'validate_migration')

export const startMigration = doing('post /api/v1/migration/start', (body: Schema['MigrationStart']): Action => ({
  title: 'Copy everything',
  object: `${body.user}@${body.host}:${body.port}/${body.database}`,
  verb: 'Copy',
  danger: true,
  effect: () => [
    { kind: 'warn', text: 'What the schemas queen and queen_proxy of the target hold now is removed first.' },
    { text: 'This server reads its database and changes nothing in it. The copy goes on when you leave the page.' },
    ...(body.excludeTableData?.length ? [{ text: `Left behind: ${body.excludeTableData.join(', ')}.` }] : []),
  ],
  calls: () => [hidden(call('post', '/api/v1/migration/start', { body }), 'start_migration')],
  done: () => 'The copy has begun',
}))

export const resetMigration = doing('post /api/v1/migration/reset', (): Action => ({
  title: 'Forget the last copy',
  verb: 'Forget',
  effect: () => [{ text: 'The target keeps what was copied to it.' }],
  calls: () => [call('post', '/api/v1/migration/reset', {}, 'queen.admin.reset_migration()')],
  done: () => 'The last copy is forgotten',
}))
