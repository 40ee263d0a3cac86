/** A few lines of Python for pages that have nothing to show yet: programs that run as they are. */
import { bearer, program, pythonValue, script } from '@/api/shown'

const HANDLE = `async def handle(message):
    print(message["data"])`

export const pushPython = (queue = 'orders') => script(`await queen.queue(${pythonValue(queue)}).push([{"data": {"order": 1}}])`)
export const enqueuePython = (namespace = 'acme', topic = 'thumbnails') =>
  script(`await queen.topic(${pythonValue(namespace)}, ${pythonValue(topic)}).priority(5).enqueue([{"data": {"image": 17}}])`)
export const consumePython = (queue: string, group = 'billing') => script(`await queen.queue(${pythonValue(queue)}).group(${pythonValue(group)}).consume(handle)`, HANDLE)
export const tracePython = () =>
  script(
    'await queen.queue("orders").group("billing").consume(handle)',
    `async def handle(message):
    await message["trace"]({"traceName": "order-4711", "data": {"text": "charged the card"}})`,
  )
export const keyPython = (namespace = 'orders') => script(`await queen.kv(${pythonValue(namespace)}).put("order-7", {"state": "packed"}, ttl=3600)`)
export const lockPython = () =>
  script(`async with queen.lock("daily-report", ttl=30):
    ...  # one at a time, on any host`)
export const timerPython = () => script('await queen.timers("reminders").schedule("order-7", {"order": 7}, seconds=3600)')
export const ephemeralPython = () => script('await queen.ephemeral("presence").push([{"user": "ada"}], partition="room-7")')
export const deadPython = () =>
  script(
    `options = {"retryLimit": 3, "deadLetterQueue": True, "dlqAfterMaxRetries": True}
await queen.queue("orders").config(options).create()
await queen.queue("orders").group("billing").consume(handle)`,
    `async def handle(message):
    raise ValueError("it is retried three times, then it is here")`,
  )
export const streamPython = () =>
  program(
    'from queen.streams import Stream',
    `runner = await (
    Stream.from_("orders")
    .window_tumbling(seconds=60)
    .aggregate({"count": lambda order: 1, "sum": lambda order: order["total"]})
    .to("order-totals")
    .run("totals-per-minute", ${pythonValue(location.origin)}${bearer()})
)
await asyncio.Event().wait()  # it runs until this program ends`,
  )
