/** What changes something: each is described once, and shown, confirmed and run by one dialog. */
import { shallowRef } from 'vue'
import type { ACCESS } from '@/api/access'
import type { Call } from '@/api/client'
import { may } from './roles'

export interface Field {
  name: string
  label: string
  kind: 'text' | 'number' | 'json' | 'check' | 'select' | 'time'
  initial?: string | number | boolean
  options?: { value: string; label: string }[]
  hint?: string
  unit?: string
  placeholder?: string
  required?: boolean
  /** Names that contain what is typed, of the server. */
  suggest?: (words: string) => Promise<string[]>
  group?: string
  /** Whether it matters, given the others. */
  when?: (form: Form) => boolean
}

export type Form = Record<string, string | number | boolean>

export interface Effect {
  kind?: 'info' | 'warn' | 'bad'
  text: string
}

export interface Change {
  name: string
  before: string
  after: string
}

export interface Action {
  title: string
  /** What it is done to; the confirmation names it. */
  object?: string
  verb: string
  danger?: boolean
  /** The name has to be typed: for what cannot be undone. */
  typed?: string
  intro?: string
  fields?: Field[]
  /** What would happen, asked of the server before it does. */
  /** `meanwhile` shows what is known already of an effect that takes long to find out. */
  effect?: (form: Form, meanwhile: (effects: Effect[]) => void) => Promise<Effect[]> | Effect[]
  changes?: (form: Form) => Change[]
  calls: (form: Form) => Call<any>[]
  /** One after the other, and no further once one has failed. */
  inOrder?: boolean
  /** What is called after an answer: for work that the server does a part at a time. */
  next?: (answer: any, form: Form) => Call<any> | undefined
  /** What follows the call that is shown, for one who does it by hand. */
  byHand?: (language: string) => string | undefined
  /** How far along it is: what an answer adds, and what all of them are expected to add. */
  progress?: { of: (answer: any) => number; total: () => number | undefined }
  /** Why nothing was done though the call was answered, also for undoing. */
  refused?: (answer: any) => string | undefined
  done: (answers: any[], form: Form) => string
  undo?: (answers: any[], form: Form) => Call<any>[] | undefined
  /** As `next`, for undoing. */
  undoNext?: (answer: any, first: Call<any>) => Call<any> | undefined
  after?: (answers: any[], form: Form) => void
}

export const current = shallowRef<Action | null>(null)

/** An action as buttons know it: calling it opens the dialog. */
export interface Doing<A extends unknown[]> {
  (...about: A): void
  /** Whether the signed-in role may do it. */
  allowed: () => boolean
}

/** An action whose role is the one that the server wants for its call. */
export function doing<A extends unknown[]>(needs: keyof typeof ACCESS, describe: (...about: A) => Action): Doing<A> {
  return Object.assign((...about: A) => void (current.value = describe(...about)), { allowed: () => may(needs) })
}
