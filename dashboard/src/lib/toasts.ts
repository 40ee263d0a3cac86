/** Short messages about what was done. */
import { reactive } from 'vue'

export interface Toast {
  id: number
  kind: 'good' | 'bad' | 'info'
  text: string
  detail?: string
  undo?: () => Promise<void>
}

export const toasts = reactive<Toast[]>([])
let next = 1

export function toast(kind: Toast['kind'], text: string, detail?: string, undo?: () => Promise<void>): void {
  const id = next++
  toasts.push({ id, kind, text, detail, undo })
  setTimeout(() => dismiss(id), kind === 'bad' || undo ? 12_000 : 6000)
}

export function dismiss(id: number): void {
  const at = toasts.findIndex((one) => one.id === id)
  if (at >= 0) toasts.splice(at, 1)
}
