import { createRouter, createWebHistory, type RouteRecordRaw } from 'vue-router'

const routes: RouteRecordRaw[] = [
  { path: '/', name: 'overview', component: () => import('@/pages/Overview.vue'), meta: { title: 'Overview' } },
  { path: '/operations', name: 'operations', component: () => import('@/pages/Operations.vue'), meta: { title: 'Operations' } },
  { path: '/analytics', name: 'analytics', component: () => import('@/pages/Analytics.vue'), meta: { title: 'Analytics' } },
  { path: '/queues', name: 'queues', component: () => import('@/pages/Queues.vue'), meta: { title: 'Queues' } },
  { path: '/queues/:queue', name: 'queue', component: () => import('@/pages/Queue.vue'), meta: { title: 'Queue', parent: 'queues' } },
  { path: '/consumers', name: 'consumers', component: () => import('@/pages/Groups.vue'), meta: { title: 'Consumer groups' } },
  { path: '/consumers/:group', name: 'group', component: () => import('@/pages/Group.vue'), meta: { title: 'Consumer group', parent: 'consumers' } },
  { path: '/messages', name: 'messages', component: () => import('@/pages/Messages.vue'), meta: { title: 'Messages' } },
  { path: '/dead-letters', name: 'dead-letters', component: () => import('@/pages/DeadLetters.vue'), meta: { title: 'Dead letters' } },
  { path: '/traces', name: 'traces', component: () => import('@/pages/Traces.vue'), meta: { title: 'Traces' } },
  { path: '/namespaces', name: 'topics', component: () => import('@/pages/Topics.vue'), meta: { title: 'Topics' } },
  { path: '/namespaces/:namespace/topics/:topic', name: 'topic', component: () => import('@/pages/Topic.vue'), meta: { title: 'Topic', parent: 'topics' } },
  { path: '/state', name: 'state', component: () => import('@/pages/State.vue'), meta: { title: 'State' } },
  { path: '/tasks', name: 'tasks', component: () => import('@/pages/Tasks.vue'), meta: { title: 'Tasks' } },
  { path: '/streams', name: 'streams', component: () => import('@/pages/Streams.vue'), meta: { title: 'Streams' } },
  { path: '/pipelines', name: 'pipelines', component: () => import('@/pages/Pipelines.vue'), meta: { title: 'Pipelines' } },
  { path: '/system', name: 'system', component: () => import('@/pages/System.vue'), meta: { title: 'System' } },
  { path: '/shards', name: 'shards', component: () => import('@/pages/Shards.vue'), meta: { title: 'Shards' } },
  { path: '/maintenance', name: 'maintenance', component: () => import('@/pages/Maintenance.vue'), meta: { title: 'Spool & maintenance' } },
  { path: '/migration', name: 'migration', component: () => import('@/pages/Migration.vue'), meta: { title: 'Migration' } },
  { path: '/settings', name: 'settings', component: () => import('@/pages/Settings.vue'), meta: { title: 'Settings' } },
  { path: '/audit', name: 'audit', component: () => import('@/pages/Audit.vue'), meta: { title: 'Audit log' } },
  { path: '/:rest(.*)*', name: 'unknown', component: () => import('@/pages/Unknown.vue'), meta: { title: 'No such page' } },
]

export const router = createRouter({
  history: createWebHistory(),
  routes,
  scrollBehavior: (to, from, saved) => saved ?? (to.path === from.path ? undefined : { top: 0 }),
})

router.afterEach((to) => {
  const object = Object.values(to.params).flat().filter(Boolean).join(' / ')
  document.title = `${to.name === 'unknown' || !object ? to.meta.title : object} | Queen`
})
