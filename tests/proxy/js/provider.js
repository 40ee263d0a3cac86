// A certified OpenID provider with one client: `node provider.js PORT REDIRECT_URI`. Whoever logs in as NAME has the
// address NAME@example.com. Prints `ready` when it listens.
import Provider from 'oidc-provider'

const [port, redirectUri] = process.argv.slice(2)
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [
    {
      client_id: 'queen',
      client_secret: 'provider secret',
      redirect_uris: [redirectUri],
      token_endpoint_auth_method: 'client_secret_post',
    },
  ],
  pkce: { required: () => true },
  claims: { openid: ['sub'], email: ['email', 'email_verified'] },
  conformIdTokenClaims: false,
  cookies: { keys: ['a key for tests'] },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: id !== 'mallory' }),
  }),
})
provider.listen(Number(port), '127.0.0.1', () => console.log('ready'))
