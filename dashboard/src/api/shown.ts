/** A call as text for people who want to script it. */
import type { Call } from './client'

const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`

export function asCurl(one: Call): string {
  const parts = ['curl -sS']
  if (one.method !== 'GET') parts.push(`-X ${one.method}`)
  parts.push(quoted(location.origin + one.url))
  if (one.body !== undefined) parts.push(`\\\n  -d ${quoted(JSON.stringify(one.shown ?? one.body))}`)
  return parts.join(' ')
}

export function asPython(one: Call): string {
  const origin = pythonValue(location.origin)
  if (one.python)
    return `from queen import Queen\n\nasync with Queen(${origin}) as queen:\n    await ${one.python}`
  const body = one.body === undefined ? '' : `,\n    json=${pythonValue(one.shown ?? one.body, 1)},\n`
  return `import requests\n\nrequests.request(\n    ${pythonValue(one.method)},\n    ${pythonValue(
    location.origin + one.url,
  )}${body || ',\n'}).raise_for_status()`
}

export function pythonValue(value: unknown, depth = 0): string {
  if (value === null || value === undefined) return 'None'
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (typeof value === 'number') return String(value)
  if (typeof value === 'string') return JSON.stringify(value)
  if (Array.isArray(value)) return `[${value.map((one) => pythonValue(one, depth + 1)).join(', ')}]`
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
