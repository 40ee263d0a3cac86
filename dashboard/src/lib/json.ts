/** JSON whose large whole numbers stay what they are: a message that is edited and sent again keeps its ids of 64 bits. */
interface ExactJson {
  parse(text: string, reviver: (key: string, value: unknown, context?: { source?: string }) => unknown): unknown
  rawJSON?(text: string): unknown
  isRawJSON?(value: unknown): value is { rawJSON: string }
}
const exact = JSON as ExactJson
const LONG = /\d{16}/

export function parseJson(text: string): unknown {
  if (!exact.rawJSON || !LONG.test(text)) return JSON.parse(text)
  return exact.parse(text, (_, value, context) =>
    typeof value === 'number' && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? '') ? exact.rawJSON!(context!.source!) : value,
  )
}

/** Characters. Browsers take seconds to edit a hundred thousand lines. */
const MOST_INDENTED = 100_000

/** As people edit it. */
export function editable(value: unknown): string {
  const line = JSON.stringify(value)
  return line.length > MOST_INDENTED ? line : JSON.stringify(value, null, 2)
}

/** The digits of a number that JavaScript has no number for. */
export const digits = (value: unknown): string | undefined => (exact.isRawJSON?.(value) ? value.rawJSON : undefined)
