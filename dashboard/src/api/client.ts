/** Calls of the HTTP API, typed by the server's own description of it. */
import { reactive, ref } from 'vue'
import { parseJson } from '@/lib/json'
import type { components, paths } from './schema'

export type Schema = components['schemas']
type Method = 'get' | 'post' | 'put' | 'delete'
type PathOf<M extends Method> = {
  [P in keyof paths]: paths[P] extends Record<M, { responses: unknown }> ? P : never
}[keyof paths]
type Operation<P extends keyof paths, M extends Method> = paths[P] extends Record<M, infer O> ? O : never
type Json<R> = R extends { content: { 'application/json': infer A } } ? A : never
type Answer<O> = O extends { responses: infer R }
  ? R extends { 200: infer A }
    ? Json<A>
    : R extends { 201: infer A }
      ? Json<A>
      : unknown
  : unknown
type Query<O> = O extends { parameters: { query?: infer Q } } ? Q : never
type PathParams<O> = O extends { parameters: { path: infer P } } ? P : never
type Body<O> = O extends { requestBody?: { content: { 'application/json': infer B } } } ? B : never

export interface Parts<O> {
  path?: PathParams<O>
  query?: Query<O>
  body?: Body<O>
}

/** One HTTP call, described: it can be sent, and shown as `curl` and as Python. */
export interface Call<A = unknown> {
  method: string
  url: string
  body?: unknown
  /** What is shown in place of a body with a secret. */
  shown?: unknown
  /** The line of Python that does the same with the client of this project. */
  python?: string
  /** How long its answer is waited for, in milliseconds. */
  timeout?: number
  readonly answer?: A
}

export function call<M extends Method, P extends PathOf<M>>(
  method: M,
  path: P,
  parts: Parts<Operation<P, M>> = {},
  python?: string,
): Call<Answer<Operation<P, M>>> {
  const values = (parts.path ?? {}) as Record<string, unknown>
  const filled = String(path).replace(/\{(\w+)\}/g, (_, name: string) => inAddress(String(values[name])))
  const query = new URLSearchParams()
  for (const [name, value] of Object.entries((parts.query ?? {}) as Record<string, unknown>))
    if (value !== undefined && value !== null && value !== '') query.set(name, String(value))
  const text = query.toString()
  return { method: method.toUpperCase(), url: filled + (text && `?${text}`), body: parts.body, python }
}

/** Browsers take `.` and `..` in an address for directories, in whatever form, so that the call would be another. */
function inAddress(value: string): string {
  if (value === '.' || value === '..') throw new ApiError(400, `No browser can ask for something called “${value}”: use the command line.`)
  return encodeURIComponent(value)
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly retryAfter: number | null = null,
  ) {
    super(message)
  }
}

/** Whether the server and its database can be reached, as the last answers showed. */
export const connection = reactive({ server: true, database: true, /** The shards that are unavailable, where others are available. */ shards: [] as number[], signIn: false, reason: '' })

/** Why PostgreSQL is unavailable, of an error that says both. */
const whyUnavailable = (message: string) => /^PostgreSQL is unavailable; reconnecting(?: \((.*)\))?$/.exec(message)?.[1] ?? ''

const TOKEN = 'queen.token'
const kept = ref(sessionStorage.getItem(TOKEN) ?? '')
export const token = {
  get: () => kept.value,
  set(value: string) {
    kept.value = value
    if (value) sessionStorage.setItem(TOKEN, value)
    else sessionStorage.removeItem(TOKEN)
  },
}

const READ_MS = 30_000
/** What is done to a million messages or partitions takes a while. */
const ACT_MS = 300_000

async function request(one: Call, accept: string): Promise<Response> {
  const headers: Record<string, string> = { Accept: accept }
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`
  if (one.body !== undefined) headers['Content-Type'] = 'application/json'
  const timeout = one.timeout ?? (one.method === 'GET' ? READ_MS : ACT_MS)
  let response: Response
  try {
    response = await fetch(one.url, {
      method: one.method,
      headers,
      body: one.body === undefined ? undefined : JSON.stringify(one.body),
      signal: AbortSignal.timeout(timeout),
    })
  } catch (cause) {
    // One slow answer is no server that is gone: of that the stream knows.
    if (cause instanceof DOMException) throw new ApiError(0, `The server did not answer within ${timeout / 1000} s.${one.method === 'GET' ? '' : ' It may be at it still: look before you repeat it.'}`)
    connection.server = false
    connection.reason = 'The server does not answer.'
    throw new ApiError(0, connection.reason)
  }
  connection.server = true
  if (response.ok) return response
  const text = await response.text()
  let message = `${response.status} ${response.statusText}`
  try {
    const { error, detail } = JSON.parse(text) as { error?: string; detail?: string }
    message = detail ? `${error}: ${detail}` : (error ?? message)
  } catch {
    // A proxy in between may answer with a page; its status says enough.
  }
  if (response.status === 503) {
    connection.database = false
    connection.reason = whyUnavailable(message)
  }
  if (response.status === 401) connection.signIn = true
  const retry = Number(response.headers.get('Retry-After'))
  throw new ApiError(response.status, message, Number.isFinite(retry) && retry > 0 ? retry : null)
}

export async function send<A>(one: Call<A>): Promise<A> {
  const response = await request(one, 'application/json')
  const text = await response.text()
  return (text ? parseJson(text) : undefined) as A
}

export async function sendText(url: string): Promise<string> {
  return (await request({ method: 'GET', url }, 'text/plain')).text()
}

export function get<P extends PathOf<'get'>>(
  path: P,
  parts: Parts<Operation<P, 'get'>> = {},
): Promise<Answer<Operation<P, 'get'>>> {
  return send(call('get', path, parts))
}
