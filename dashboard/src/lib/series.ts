/** Buckets of history, made ready for charts. */

/** Oldest first, without the bucket that is still being counted; missing buckets are gaps. */
export function timeline<P>(points: P[], at: (point: P) => string, bucketMinutes: number): { times: number[]; points: (P | null)[] } {
  const step = bucketMinutes * 60
  const until = Date.now() / 1000 - step
  const byTime = new Map<number, P>()
  const all = points.map((point) => [Date.parse(at(point)) / 1000, point] as const)
  const whole = all.filter(([time]) => time <= until)
  // A server that has just started has no other.
  for (const [time, point] of whole.length ? whole : all) byTime.set(time, point)
  const known = [...byTime.keys()].sort((a, b) => a - b)
  const times: number[] = []
  for (const time of known) {
    const last = times.at(-1)
    // One bucket without a value breaks the line; more would say the same.
    if (last !== undefined && time - last > step * 1.5) times.push(last + step)
    times.push(time)
  }
  return { times, points: times.map((time) => byTime.get(time) ?? null) }
}

export function pick<P>(points: (P | null)[], value: (point: P) => number | null | undefined): (number | null)[] {
  return points.map((point) => (point === null ? null : (value(point) ?? null)))
}

/** Several rows of the same bucket, added up. */
export function sumBy<P>(points: P[], at: (point: P) => string): Map<string, P[]> {
  const found = new Map<string, P[]>()
  for (const point of points) {
    const key = at(point)
    const list = found.get(key)
    if (list) list.push(point)
    else found.set(key, [point])
  }
  return found
}

export const lagTone = (seconds: number): '' | 'warn' | 'bad' => (seconds >= 300 ? 'bad' : seconds >= 60 ? 'warn' : '')

export const COLORS = ['--push', '--pop', '--ack', '--s4', '--s5', '--s6']
