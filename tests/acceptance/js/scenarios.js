// Scenarios of the published JavaScript client. `node scenarios.js URL NAME...` runs those named and reports each as
// a line `RESULT {"id", "error", "seconds"}` on standard output.
import assert from 'node:assert/strict'
import { Queen } from 'queen-mq'

const data = (messages) => messages.map((message) => message.data)

const scenarios = {
  async a_pushed_message_is_popped_and_acknowledged({ queen, queue }) {
    const [pushed] = await queen.queue(queue).push([{ transactionId: 'one', data: { n: 1 } }])
    assert.equal(pushed.status, 'queued')
    assert.equal(pushed.transaction_id, 'one')
    const messages = await queen.queue(queue).batch(10).wait(false).pop()
    assert.deepEqual(data(messages), [{ n: 1 }])
    assert.equal((await queen.ack(messages[0], true)).success, true)
    assert.deepEqual(await queen.queue(queue).wait(false).pop(), [])
  },

  async duplicates_and_empty_pushes_are_answered({ queen, queue }) {
    const [first] = await queen.queue(queue).push([{ transactionId: 'same', data: {} }])
    const [second] = await queen.queue(queue).push([{ transactionId: 'same', data: {} }])
    assert.deepEqual([first.status, second.status], ['queued', 'duplicate'])
    assert.equal(second.message_id, first.message_id)
    assert.deepEqual(await queen.queue(queue).push([]), [])
  },

  async null_and_empty_payloads_survive({ queen, queue }) {
    await queen.queue(queue).push([{ data: null }, { data: {} }])
    assert.deepEqual(data(await queen.queue(queue).batch(2).wait(false).pop()), [null, {}])
  },

  async a_waiting_pop_gets_a_later_message({ queen, queue }) {
    const popping = queen.queue(queue).wait(true).pop()
    await new Promise((resolve) => setTimeout(resolve, 1000))
    await queen.queue(queue).push([{ data: { n: 1 } }])
    assert.deepEqual(data(await popping), [{ n: 1 }])
  },

  async an_expired_lease_is_answered_with_success({ queen, queue }) {
    await queen.queue(queue).config({ leaseTime: 1 }).create()
    await queen.queue(queue).push([{ data: { n: 1 } }])
    const [first] = await queen.queue(queue).wait(false).pop()
    const [second] = await queen.queue(queue).wait(true).pop()
    assert.equal(second.id, first.id)
    // An item that failed stays a 200 with its array, which this client spreads under its own `success`.
    assert.equal((await queen.ack(first, true))[0].success, false)
    assert.equal((await queen.renew(second)).success, true)
    assert.equal((await queen.ack([second], true)).success, true)
  },

  async a_handler_consumes_in_order({ queen, queue }) {
    await queen.queue(queue).push(Array.from({ length: 50 }, (_, n) => ({ data: { n } })))
    const seen = []
    await queen.queue(queue).group('g').batch(10).limit(50).each().consume(async (message) => {
      seen.push(message.data.n)
    })
    assert.deepEqual(seen, Array.from({ length: 50 }, (_, n) => n))
  },

  async a_transaction_moves_a_message({ queen, queue }) {
    await queen.queue(queue).push([{ data: { step: 1 } }])
    const [message] = await queen.queue(queue).wait(false).pop()
    const moving = queen.transaction().ack(message).queue(`${queue}-next`).push([{ data: { step: 2 } }])
    assert.equal((await moving.commit()).success, true)
    assert.deepEqual(await queen.queue(queue).wait(false).pop(), [])
    assert.deepEqual(data(await queen.queue(`${queue}-next`).wait(false).pop()), [{ step: 2 }])
  },

  async an_exhausted_message_is_a_dead_letter({ queen, queue }) {
    await queen.queue(queue).config({ retryLimit: 0 }).create()
    await queen.queue(queue).push([{ data: { n: 1 } }])
    const [message] = await queen.queue(queue).wait(false).pop()
    await queen.ack(message, false, { error: 'cannot digest this' })
    const letters = (await queen.queue(queue).dlq().get()).messages
    assert.deepEqual(data(letters), [{ n: 1 }])
    assert.match(letters[0].errorMessage, /cannot digest this/)
  },
}

async function run(url, name) {
  const begun = performance.now()
  const queen = new Queen({ url, handleSignals: false, bearerToken: process.env.QUEEN_ACCEPTANCE_TOKEN })
  let error = null
  try {
    await scenarios[name]({ queen, queue: `test-js-${name.replaceAll('_', '-')}` })
  } catch (thrown) {
    error = thrown.stack
  } finally {
    await queen.close()
  }
  return { id: name, error, seconds: (performance.now() - begun) / 1000 }
}

const [url, ...names] = process.argv.slice(2)
// The client may print, too; reports are told from that by their mark.
const results = names.map(async (name) => console.log(`RESULT ${JSON.stringify(await run(url, name))}`))
await Promise.all(results)
