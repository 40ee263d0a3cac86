/** Dark or light: as the reader chose, else as the system is. */
import { ref, watchEffect } from 'vue'

type Theme = 'dark' | 'light'
const KEY = 'queen.theme'
const system = matchMedia('(prefers-color-scheme: dark)')
const stored = localStorage.getItem(KEY)
let chosen: Theme | null = stored === 'dark' || stored === 'light' ? stored : null

export const theme = ref<Theme>(chosen ?? (system.matches ? 'dark' : 'light'))
system.addEventListener('change', () => {
  if (!chosen) theme.value = system.matches ? 'dark' : 'light'
})
watchEffect(() => {
  document.documentElement.dataset.theme = theme.value
})

export function toggleTheme(): void {
  chosen = theme.value === 'dark' ? 'light' : 'dark'
  theme.value = chosen
  localStorage.setItem(KEY, chosen)
}
