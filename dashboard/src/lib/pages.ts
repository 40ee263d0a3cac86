import type { Role } from './roles'

/** Every page: its place in the menu, its address and the keys that lead to it. */
export interface Page {
  name: string
  title: string
  path: string
  icon: string
  keys?: string
  needs?: Role
}

export const MENU: { title: string; pages: Page[] }[] = [
  {
    title: 'Monitor',
    pages: [
      { name: 'overview', title: 'Overview', path: '/', icon: 'overview', keys: 'g o' },
      { name: 'operations', title: 'Operations', path: '/operations', icon: 'operations', keys: 'g p' },
      { name: 'analytics', title: 'Analytics', path: '/analytics', icon: 'analytics', keys: 'g a' },
    ],
  },
  {
    title: 'Messaging',
    pages: [
      { name: 'queues', title: 'Queues', path: '/queues', icon: 'queues', keys: 'g q' },
      { name: 'consumers', title: 'Consumer groups', path: '/consumers', icon: 'consumers', keys: 'g c' },
      { name: 'messages', title: 'Messages', path: '/messages', icon: 'messages', keys: 'g m' },
      { name: 'dead-letters', title: 'Dead letters', path: '/dead-letters', icon: 'dead', keys: 'g d' },
      { name: 'traces', title: 'Traces', path: '/traces', icon: 'traces', keys: 'g t' },
      { name: 'topics', title: 'Topics', path: '/namespaces', icon: 'topics', keys: 'g n' },
      { name: 'state', title: 'State', path: '/state', icon: 'state', keys: 'g e' },
    ],
  },
  {
    title: 'Processing',
    pages: [
      { name: 'tasks', title: 'Tasks', path: '/tasks', icon: 'tasks', keys: 'g k' },
      { name: 'streams', title: 'Streams', path: '/streams', icon: 'streams' },
      { name: 'pipelines', title: 'Pipelines', path: '/pipelines', icon: 'pipelines' },
    ],
  },
  {
    title: 'Infrastructure',
    pages: [
      { name: 'system', title: 'System', path: '/system', icon: 'system', keys: 'g s' },
      { name: 'shards', title: 'Shards', path: '/shards', icon: 'shards' },
      { name: 'maintenance', title: 'Spool & maintenance', path: '/maintenance', icon: 'maintenance', needs: 'admin' },
      { name: 'migration', title: 'Migration', path: '/migration', icon: 'database', needs: 'admin' },
      { name: 'settings', title: 'Settings', path: '/settings', icon: 'settings', needs: 'admin' },
      { name: 'audit', title: 'Audit log', path: '/audit', icon: 'audit', needs: 'admin' },
    ],
  },
]

export const PAGES: Page[] = MENU.flatMap((group) => group.pages)
