/** Queues by name, as the server finds them. */
import { get } from '@/api/client'

const MOST = 20

/** Names that contain these words, for inputs that suggest. */
export async function queueNames(words: string): Promise<string[]> {
  const { queues } = await get('/api/v1/resources/queues', { query: { search: words || undefined, sort: 'name', order: 'asc', limit: MOST } })
  return queues.map((one) => one.name)
}
