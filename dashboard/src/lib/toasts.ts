/** Short messages about what was done. */
import { reactive, ref } from 'vue'

export interface Toast {
  id: number
  kind: 'good' | 'bad' | 'info'
  text: string
  detail?: string
  undo?: () => Promise<void>
}

export const toasts = reactive<Toast[]>([])
/** Whether somebody is at them: under the pointer or with the keyboard. */
export const held = ref(false)
let next = 1
const AT_LEAST_MS = 2000

export function toast(kind: Toast['kind'], text: string, detail?: string, undo?: () => Promise<void>): void {
  const id = next++
  toasts.push({ id, kind, text, detail, undo })
  setTimeout(() => leave(id), kind === 'bad' || undo ? 12_000 : 6000)
}

/** None goes away while it is read, or its button is about to be pressed. */
function leave(id: number): void {
  if (held.value) setTimeout(() => leave(id), AT_LEAST_MS)
  else dismiss(id)
}

export function dismiss(id: number): void {
  const at = toasts.findIndex((one) => one.id === id)
  if (at >= 0) toasts.splice(at, 1)
  if (!toasts.length) held.value = false
}
