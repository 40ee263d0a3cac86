/** All queues, however many there are: the server answers a thousand at a time. */
import { ref, shallowRef, type Ref, type ShallowRef } from 'vue'
import { get, type ApiError, type Schema } from '@/api/client'
import { useLive } from './live'

const PAGE = 1000
const OFTEN_MS = 1000
const SELDOM_MS = 15_000

export function useQueues(): { queues: ShallowRef<Schema['QueueInList'][] | undefined>; error: Ref<ApiError | null>; loading: Ref<boolean>; refresh: () => Promise<void> } {
  const queues = shallowRef<Schema['QueueInList'][]>()
  const total = ref(0)
  let loadedAt = 0
  const live = useLive(async () => {
    // Of very many queues the list is asked for seldom, whatever else goes on.
    if (total.value > PAGE && Date.now() - loadedAt < SELDOM_MS) return
    const found: Schema['QueueInList'][] = []
    for (let offset = 0; ; offset += PAGE) {
      const answer = await get('/api/v1/resources/queues', { query: { limit: PAGE, offset } })
      found.push(...answer.queues)
      if (answer.queues.length < PAGE) break
    }
    total.value = found.length
    loadedAt = Date.now()
    queues.value = found
  }, OFTEN_MS)
  const refresh = () => {
    loadedAt = 0
    return live.refresh()
  }
  return { queues, error: live.error, loading: live.loading, refresh }
}

/** Names that contain these words, for inputs that suggest. */
export async function queueNames(words: string): Promise<string[]> {
  const { queues } = await get('/api/v1/resources/queues', { query: { limit: PAGE } })
  const wanted = words.toLowerCase()
  return queues.map((one) => one.name).filter((name) => name.toLowerCase().includes(wanted)).slice(0, 20)
}
