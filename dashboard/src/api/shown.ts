/** A call as text for people who want to script it. */
import { digits } from '@/lib/json'
import { user } from '@/lib/roles'
import { token, type Call } from './client'

const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`

/** Characters, each of up to four bytes. */
const MOST_IN_ARGUMENT = 30_000

/** Whether the server asks who calls; what is shown then reads the token from the environment. */
const wantsToken = () => Boolean(user.value || token.get())

export function asCurl(one: Call): string {
  const parts = ['curl -sS']
  if (one.method !== 'GET') parts.push(`-X ${one.method}`)
  if (wantsToken()) parts.push('-H "Authorization: Bearer $QUEEN_TOKEN"')
  parts.push(quoted(location.origin + one.url))
  if (one.body === undefined) return parts.join(' ')
  const body = JSON.stringify(one.shown ?? one.body)
  // Linux takes no argument of more than 128 kB.
  if (body.length > MOST_IN_ARGUMENT) return `${parts.join(' ')} --data-binary @- <<'JSON'\n${body}\nJSON`
  return `${parts.join(' ')} \\\n  -d ${quoted(body)}`
}

export function asPython(one: Call): string {
  if (one.python) return script(`await ${one.python}`)
  const secret = wantsToken()
  const headers = secret ? '    headers={"Authorization": f"Bearer {os.environ[\'QUEEN_TOKEN\']}"},\n' : ''
  const body = one.body === undefined ? '' : `    json=${pythonValue(one.shown ?? one.body, 1)},\n`
  return `${secret ? 'import os\n\n' : ''}import requests\n\nrequests.request(\n    ${pythonValue(one.method)},\n    ${pythonValue(location.origin + one.url)},\n${headers}${body}).raise_for_status()`
}

/** Lines that use a client named `queen`, as a program that runs as it is. */
export function script(lines: string, before = ''): string {
  return program('from queen import Queen', `async with Queen(${pythonValue(location.origin)}${bearer()}) as queen:\n${indented(lines)}`, before)
}
export const bearer = () => (wantsToken() ? ', bearer_token=os.environ["QUEEN_TOKEN"]' : '')

/** Python knows `await` in functions alone. */
export function program(imports: string, lines: string, before = ''): string {
  const modules = ['import asyncio', ...(wantsToken() ? ['import os'] : []), '', imports].join('\n')
  return [modules, before, `async def main():\n${indented(lines)}`, 'asyncio.run(main())'].filter(Boolean).join('\n\n\n')
}
const indented = (lines: string) => lines.replace(/^(?=.)/gm, '    ')

export function pythonValue(value: unknown, depth = 0): string {
  if (value === null || value === undefined) return 'None'
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (typeof value === 'number') return String(value)
  if (typeof value === 'string') return JSON.stringify(value)
  if (Array.isArray(value)) return `[${value.map((one) => pythonValue(one, depth + 1)).join(', ')}]`
  const long = digits(value)
  if (long !== undefined) return long
  const entries = Object.entries(value as object).filter(([, one]) => one !== undefined)
  return `{${entries.map(([key, one]) => `${JSON.stringify(key)}: ${pythonValue(one, depth + 1)}`).join(', ')}}`
}

/** A call of the client's administration; names that Python keeps for itself go into a dictionary. */
export function adminPython(method: string, values: unknown[], named: Record<string, unknown> = {}): string {
  const given = Object.entries(named).filter(([, value]) => value !== undefined && value !== null)
  const reserved = given.filter(([name]) => name === 'from')
  const parts = [
    ...values.map((one) => pythonValue(one)),
    ...given.filter(([name]) => name !== 'from').map(([name, value]) => `${name}=${pythonValue(value)}`),
    ...(reserved.length ? [`**${pythonValue(Object.fromEntries(reserved))}`] : []),
  ]
  return `queen.admin.${method}(${parts.join(', ')})`
}
