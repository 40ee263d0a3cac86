import '@/styles/main.css'
import '@/lib/theme'
import { createApp } from 'vue'
import App from '@/App.vue'
import { whoAmI } from '@/lib/roles'
import { router } from '@/router'

// Nothing is asked for or offered before it is known to whom.
void whoAmI().then(() => createApp(App).use(router).mount('#app'))
