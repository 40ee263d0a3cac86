/** What the signed-in person may do. Without authentication, everything. */
import { ref } from 'vue'
import { ACCESS } from '@/api/access'
import { connection, token } from '@/api/client'

export type Role = 'read-only' | 'read-write' | 'admin'
const LEVELS: Record<Role, number> = { 'read-only': 1, 'read-write': 2, admin: 3 }

export const user = ref<{ username: string; role: Role } | null>(null)

/** The role of a token, as its claims say; the server decides in the end. */
export function roleOf(jwt: string): Role | null {
  try {
    const claims = JSON.parse(atob(jwt.split('.')[1]!.replaceAll('-', '+').replaceAll('_', '/'))) as {
      role?: string
      roles?: string[]
    }
    const roles = [claims.role, ...(claims.roles ?? [])]
    return (['admin', 'read-write', 'read-only'] as const).find((one) => roles.includes(one)) ?? null
  } catch {
    return null
  }
}

export function can(role: Role): boolean {
  const mine = user.value?.role ?? (token.get() ? roleOf(token.get()) : null)
  return mine === null || LEVELS[mine] >= LEVELS[role]
}

/** Whether a call is open to the signed-in role. */
export const may = (call: keyof typeof ACCESS): boolean => can(ACCESS[call])

interface Me {
  username: string | null
  role: Role | null
  wantsToken?: boolean
}

/** Who is signed in, by the server or a proxy in front of it; nobody where there is no login, and then a token may be wanted. */
export async function whoAmI(): Promise<void> {
  try {
    const response = await fetch('/api/me', { headers: { Accept: 'application/json' } })
    if (!response.ok) return
    const { username, role, wantsToken } = (await response.json()) as Me
    if (username && role) user.value = { username, role }
    else if (wantsToken && !token.get()) connection.signIn = true
  } catch {
    user.value = null
  }
}
