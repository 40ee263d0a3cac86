/** Queues by name, as the server finds them. */
import { ApiError, get } from '@/api/client'

const MOST = 20

export async function queueExists(queue: string): Promise<boolean> {
  try {
    await get('/api/v1/status/queues/{queue}', { path: { queue }, query: { includePartitions: false } })
    return true
  } catch (cause) {
    if (cause instanceof ApiError && cause.status === 404) return false
    throw cause
  }
}

/** Names that contain these words, for inputs that suggest. */
export async function queueNames(words: string): Promise<string[]> {
  const { queues } = await get('/api/v1/resources/queues', { query: { search: words || undefined, sort: 'name', order: 'asc', limit: MOST } })
  return queues.map((one) => one.name)
}
