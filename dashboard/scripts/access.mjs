/** Writes which role each call of the API needs, as the server declares it; what everybody may read is left out. */
import { readFileSync, writeFileSync } from 'node:fs'

const { paths } = JSON.parse(readFileSync('openapi.json', 'utf8'))
const lines = Object.entries(paths).flatMap(([path, calls]) =>
  Object.entries(calls)
    .filter(([, operation]) => ['read-write', 'admin'].includes(operation['x-access']))
    .map(([method, operation]) => `  '${method} ${path}': '${operation['x-access']}',\n`),
)
writeFileSync(
  'src/api/access.ts',
  `/** Made from openapi.json by \`npm run types\`: the role that a call needs. */\nexport const ACCESS = {\n${lines.join('')}} as const\n`,
)
