/** Messages by what their payloads hold: the server looks at so many with each call, and says where to go on. */
import { computed, ref, type ComputedRef, type Ref } from 'vue'
import { get, type Schema } from '@/api/client'
import { useLive, type Live } from './live'

type Found = Schema['SearchedMessage']
/** Messages of a queue by what they are and hold, however many. */
export type MessageFilter = Schema['BulkFilter'] & { queue: string }
export interface MessageSearch {
  live: Live<Found[]>
  scanned: Ref<number>
  /** Whether there is more to look at. */
  more: ComputedRef<boolean>
  goOn: () => void
}

const WANTED = 100
/** Then the reader is asked whether to go on. */
const MOST_CALLS = 25

/** Searches when there is something to search for, and again when that changes. */
export function useMessageSearch(filter: () => MessageFilter | null): MessageSearch {
  const scanned = ref(0)
  const cursor = ref<string | null>(null)
  const round = ref(0)
  let kept: Found[] = []
  let goingOn = false
  const wanted = computed(() => JSON.stringify(filter()))

  const live = useLive(
    async () => {
      const [asked, mine] = [filter(), wanted.value]
      if (!goingOn) {
        kept = []
        scanned.value = 0
        cursor.value = null
      }
      goingOn = false
      if (!asked) return []
      const { where, ...rest } = asked
      const enough = kept.length + WANTED
      for (let calls = 0; calls < MOST_CALLS && kept.length < enough; calls += 1) {
        const query = { ...rest, where: where?.length ? JSON.stringify(where) : undefined, limit: WANTED, cursor: cursor.value ?? undefined }
        const answer = await get('/api/v1/messages/search', { query: query as never })
        if (mine !== wanted.value) break
        kept = [...kept, ...answer.messages]
        scanned.value += answer.scanned
        cursor.value = answer.cursor
        if (!answer.cursor) break
      }
      return kept
    },
    0,
    [wanted, round],
  )
  const goOn = () => {
    goingOn = true
    round.value += 1
  }
  return { live, scanned, more: computed(() => cursor.value !== null), goOn }
}
