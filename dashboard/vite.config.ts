import { createHash } from 'node:crypto'
import { existsSync, readFileSync, readdirSync, statSync, writeFileSync } from 'node:fs'
import { join, relative, resolve } from 'node:path'
import { brotliCompressSync, constants, gzipSync } from 'node:zlib'
import vue from '@vitejs/plugin-vue'
import { defineConfig, type Plugin } from 'vite'

const here = import.meta.dirname
const target = resolve(here, '../src/queen/dashboard/static')
const server = process.env.QUEEN_URL ?? 'http://127.0.0.1:6632'

const SOURCES = ['index.html', 'package.json', 'package-lock.json', 'tsconfig.json', 'vite.config.ts', 'public', 'src']
const COMPRESSIBLE = /\.(html|js|css|svg)$/

function files(path: string): string[] {
  if (!existsSync(path)) return []
  if (statSync(path).isFile()) return [path]
  return readdirSync(path).flatMap((name) => files(join(path, name)))
}

/** Fingerprint of everything the build is made of; tests/http/test_dashboard_files.py computes the same without Node. */
function sourceHash(): string {
  const lines = SOURCES.flatMap((name) => files(resolve(here, name)))
    .map((path) => relative(here, path))
    .sort()
    .map((name) => `${name} ${createHash('sha256').update(readFileSync(resolve(here, name))).digest('hex')}\n`)
  return createHash('sha256').update(lines.join('')).digest('hex')
}

/** Compresses every file ahead of time and says of which sources the build is. */
function finish(): Plugin {
  return {
    name: 'finish',
    apply: 'build',
    closeBundle() {
      for (const path of files(target).filter((one) => COMPRESSIBLE.test(one))) {
        const body = readFileSync(path)
        writeFileSync(`${path}.gz`, gzipSync(body, { level: 9 }))
        writeFileSync(
          `${path}.br`,
          brotliCompressSync(body, {
            params: { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: body.length },
          }),
        )
      }
      writeFileSync(join(target, 'build.json'), `${JSON.stringify({ sources: sourceHash() })}\n`)
    },
  }
}

export default defineConfig({
  plugins: [vue(), finish()],
  resolve: { alias: { '@': resolve(here, 'src') } },
  build: {
    outDir: target,
    emptyOutDir: true,
    target: 'es2022',
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    chunkSizeWarningLimit: 600,
    cssCodeSplit: false,
    // One file: small enough for the first page, and no page is ever waited for.
    rollupOptions: { output: { inlineDynamicImports: true } },
  },
  server: {
    proxy: Object.fromEntries(
      ['/api', '/health', '/metrics', '/readyz', '/docs', '/openapi.json', '/streams/v1'].map((path) => [path, server]),
    ),
  },
})
