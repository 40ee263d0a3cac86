/** Numbers, sizes and times as people read them. */

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 })
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumFractionDigits: 1 })

/** 12,345; past a million 1.2M. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return '–'
  return Math.abs(value) < 1_000_000 ? whole.format(value) : short.format(value)
}

export function exact(value: number | null | undefined): string {
  return value === null || value === undefined ? '–' : whole.format(value)
}

export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return '–'
  if (Math.abs(value) >= 100 && Math.abs(value) < 1000) return whole.format(value)
  return Math.abs(value) < 10 && !Number.isInteger(value) ? value.toFixed(Math.abs(value) < 1 ? 2 : 1) : short.format(value)
}

export function perSecond(value: number | null | undefined): string {
  return value === null || value === undefined ? '–' : `${compact(value)}/s`
}

export function percent(value: number | null | undefined, digits = 0): string {
  return value === null || value === undefined || Number.isNaN(value) ? '–' : `${value.toFixed(digits)} %`
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return '–'
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let size = value
  let unit = 0
  while (Math.abs(size) >= 1000 && unit < units.length - 1) {
    size /= 1000
    unit += 1
  }
  return `${size < 10 && unit > 0 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`
}

export function milliseconds(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return '–'
  if (value < 1) return value === 0 ? '0 ms' : `${value.toFixed(2)} ms`
  if (value < 10) return `${value.toFixed(1)} ms`
  if (value < 1000) return `${Math.round(value)} ms`
  return duration(value / 1000)
}

/** 4 s, 3 min, 2 h 5 min, 3 d. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return '–'
  if (seconds > 0 && seconds < 1) return milliseconds(seconds * 1000)
  if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`
  const total = Math.round(seconds)
  if (total < 60) return `${total} s`
  if (total < 3600) return two(total, 60, 'min', 1, 's', total < 600)
  if (total < 86_400) return two(total, 3600, 'h', 60, 'min', true)
  return two(total, 86_400, 'd', 3600, 'h', total < 864_000)
}

function two(total: number, size: number, name: string, small: number, smallName: string, both: boolean): string {
  const rest = Math.floor((total % size) / small)
  return `${Math.floor(total / size)} ${name}${both && rest ? ` ${rest} ${smallName}` : ''}`
}

export function relative(iso: string | null | undefined, now: number): string {
  if (!iso) return '–'
  const seconds = (now - Date.parse(iso)) / 1000
  if (Math.abs(seconds) < 1.5) return 'now'
  const text = duration(Math.round(Math.abs(seconds)))
  return seconds < 0 ? `in ${text}` : `${text} ago`
}

const pad = (value: number, digits = 2) => String(value).padStart(digits, '0')

/** 2026-11-16 10:52:43.120, in the time zone of the reader. */
export function absolute(iso: string | null | undefined): string {
  if (!iso) return '–'
  const at = new Date(iso)
  return `${day(at)} ${clock(at)}.${pad(at.getMilliseconds(), 3)}`
}

/** With the time zone, for those who compare it with a log. */
export function zoned(iso: string | null | undefined): string {
  if (!iso) return '–'
  const minutes = -new Date(iso).getTimezoneOffset()
  const offset = `${minutes < 0 ? '-' : '+'}${pad(Math.floor(Math.abs(minutes) / 60))}:${pad(Math.abs(minutes) % 60)}`
  return `${absolute(iso)} UTC${minutes ? offset : ''}`
}

export const day = (at: Date) => `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`
export const clock = (at: Date) => `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`

/** What an <input type="datetime-local"> holds. */
export const localInput = (at: Date) => `${day(at)}T${clock(at)}`

export function plural(value: number | null | undefined, one: string, many = `${one}s`): string {
  return `${exact(value)} ${value === 1 ? one : many}`
}
/** As `plural`, where there is little room. */
export function shortPlural(value: number | null | undefined, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`
}

export const QUEUE_MODE = '__QUEUE_MODE__'
export const groupLabel = (group: string) => (group === QUEUE_MODE ? 'queue mode' : group)

/** Control and format characters, ends of lines, halves of characters, and letters that are drawn as nothing. */
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/gu

/** Characters that are not seen, made visible: names are shown as what they are. */
export function visible(text: string): string {
  return text.replace(UNSEEN, (one) => {
    const code = one.codePointAt(0) ?? 0
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, '0')}⟩`
  })
}

/** The same of a text of several lines. */
export const visibleLines = (text: string) => text.split('\n').map(visible).join('\n')
