/** The text exposition of Prometheus, read. */
export interface Sample {
  name: string
  labels: Record<string, string>
  value: number
}

export class Metrics {
  private readonly byName = new Map<string, Sample[]>()

  constructor(samples: Sample[]) {
    for (const one of samples) {
      const found = this.byName.get(one.name)
      if (found) found.push(one)
      else this.byName.set(one.name, [one])
    }
  }

  all(name: string): Sample[] {
    return this.byName.get(name) ?? []
  }

  starting(prefix: string): Sample[] {
    return [...this.byName].filter(([name]) => name.startsWith(prefix)).flatMap(([, samples]) => samples)
  }

  value(name: string, labels: Record<string, string> = {}): number | undefined {
    return this.all(name).find((one) => Object.entries(labels).every(([key, value]) => one.labels[key] === value))?.value
  }
}

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g
const ESCAPES: Record<string, string> = { '\\n': '\n', '\\"': '"', '\\\\': '\\' }

export function parseMetrics(text: string): Metrics {
  const samples: Sample[] = []
  for (const line of text.split('\n')) {
    if (!line || line.startsWith('#')) continue
    const found = LINE.exec(line)
    if (!found) continue
    const labels: Record<string, string> = {}
    for (const [, name, value] of (found[2] ?? '').matchAll(LABEL))
      labels[name!] = value!.replace(/\\[n"\\]/g, (one) => ESCAPES[one] ?? one)
    samples.push({ name: found[1]!, labels, value: Number(found[3]) })
  }
  return new Metrics(samples)
}
