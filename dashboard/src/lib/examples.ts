/** Three lines of Python for pages that have nothing to show yet. */
const CLIENT = `from queen import Queen

async with Queen("${location.origin}") as queen:
    `
export const pushPython = (queue = 'orders') => `${CLIENT}await queen.queue(${JSON.stringify(queue)}).push([{"data": {"order": 1}}])`
export const enqueuePython = (namespace = 'acme', topic = 'thumbnails') =>
  `${CLIENT}await queen.topic(${JSON.stringify(namespace)}, ${JSON.stringify(topic)}).priority(5).enqueue([{"data": {"image": 17}}])`
export const consumePython = (queue: string) => `async def handle(message):
    print(message["data"])

await queen.queue(${JSON.stringify(queue)}).group("billing").consume(handle)`
export const TRACE_PYTHON = `async def handle(message):
    await message["trace"]({"traceName": "order-4711", "data": {"text": "charged the card"}})

await queen.queue("orders").consume(handle)`
export const KEY_PYTHON = `${CLIENT}await queen.kv("orders").put("order-7", {"state": "packed"}, ttl=3600)`
export const LOCK_PYTHON = `async with queen.lock("daily-report", ttl=30):
    ...  # one at a time, on any host`
export const TIMER_PYTHON = `${CLIENT}await queen.timers("reminders").schedule("order-7", {"order": 7}, seconds=3600)`
export const EPHEMERAL_PYTHON = `${CLIENT}await queen.ephemeral("presence").push([{"user": "ada"}], partition="room-7")`
export const DEAD_PYTHON = `await queen.queue("orders").config({"retryLimit": 3, "deadLetterQueue": True, "dlqAfterMaxRetries": True}).create()

async def handle(message):
    raise ValueError("it is retried three times, then it is here")`
export const STREAM_PYTHON = `from queen.streams import Stream

runner = await (
    Stream.from_("orders")
    .window_tumbling(seconds=60)
    .aggregate({"count": lambda order: 1, "sum": lambda order: order["total"]})
    .to("order-totals")
    .run("totals-per-minute", "${location.origin}")
)`
