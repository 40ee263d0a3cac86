-- Rolling up: what is read for it, where it is kept, and what the dashboard shows.

-- name: rollup_queues
-- The queues there are.
SELECT name FROM queen.queues ORDER BY name;

-- name: rollup_last
-- The newest minute whose messages were rolled up; null before the first time.
SELECT max(minute) FROM queen.rollup_minutes WHERE group_name = '';

-- name: rollup_latencies
-- How long messages had waited when workers delivered them, by queue and minute.
SELECT date_trunc('minute', at) AS minute, queue_name AS queue, sum(pop_messages)::bigint AS delivered,
    sum(lag_ms) AS latency_ms, max(lag_max_ms) AS latency_max_ms
FROM queen.metric_queue_minutes
WHERE at >= $1 AND at < $2 AND pop_messages > 0
GROUP BY 1, 2;

-- name: rollup_save
-- Keep rows (JSON); those of a minute that was rolled up before are replaced, and what is not known now stays.
WITH given AS (
    SELECT * FROM jsonb_to_recordset($1::jsonb) AS r (
        minute timestamptz, queue text, "group" text, messages bigint, bytes bigint, largest_bytes bigint,
        partitions bigint, delivered bigint, latency_ms float8, latency_max_ms float8, consumed_total bigint,
        lag_messages bigint, lag_seconds float8, errors bigint)
)
INSERT INTO queen.rollup_minutes AS kept (minute, queue_name, group_name, messages, bytes, largest_bytes, partitions,
    delivered, latency_ms, latency_max_ms, consumed, consumed_total, lag_messages, lag_seconds, errors)
SELECT n.minute, n.queue, n."group", n.messages, n.bytes, n.largest_bytes, n.partitions, n.delivered, n.latency_ms,
    n.latency_max_ms, greatest(0, n.consumed_total - before.consumed_total), n.consumed_total, n.lag_messages,
    n.lag_seconds, n.errors
FROM given n
LEFT JOIN LATERAL (
    SELECT consumed_total FROM queen.rollup_minutes o
    WHERE o.queue_name = n.queue AND o.group_name = n."group" AND o.minute < n.minute AND o.consumed_total IS NOT NULL
    ORDER BY o.minute DESC LIMIT 1
) before ON n.consumed_total IS NOT NULL
ORDER BY n.queue, n."group", n.minute
ON CONFLICT (queue_name, group_name, minute) DO UPDATE SET
    messages = coalesce(excluded.messages, kept.messages),
    bytes = coalesce(excluded.bytes, kept.bytes),
    largest_bytes = coalesce(excluded.largest_bytes, kept.largest_bytes),
    partitions = coalesce(excluded.partitions, kept.partitions),
    delivered = coalesce(excluded.delivered, kept.delivered),
    latency_ms = coalesce(excluded.latency_ms, kept.latency_ms),
    latency_max_ms = coalesce(excluded.latency_max_ms, kept.latency_max_ms),
    consumed = coalesce(excluded.consumed, kept.consumed),
    consumed_total = coalesce(excluded.consumed_total, kept.consumed_total),
    lag_messages = CASE WHEN excluded.consumed_total IS NULL THEN kept.lag_messages ELSE excluded.lag_messages END,
    lag_seconds = CASE WHEN excluded.consumed_total IS NULL THEN kept.lag_seconds ELSE excluded.lag_seconds END,
    errors = coalesce(excluded.errors, kept.errors),
    rolled_at = clock_timestamp();

-- name: rollup_forget
-- Drop minutes before a time.
DELETE FROM queen.rollup_minutes WHERE minute < $1;

-- name: rollup_series
-- Rolled up minutes of queues (or of one, and of one group), in buckets of so many minutes, oldest first.
SELECT date_bin(make_interval(mins => $3), minute, 'epoch') AS bucket, queue_name, group_name,
    sum(messages)::bigint AS messages, sum(bytes)::bigint AS bytes, max(largest_bytes) AS largest_bytes,
    max(partitions) AS partitions, sum(delivered)::bigint AS delivered, sum(latency_ms) AS latency_ms,
    max(latency_max_ms) AS latency_max_ms, sum(consumed)::bigint AS consumed, max(lag_messages) AS lag_messages,
    max(lag_seconds) AS lag_seconds, sum(errors)::bigint AS errors
FROM queen.rollup_minutes
WHERE minute >= $1 AND minute < $2 AND ($4::text = '' OR queue_name = $4) AND ($5::text = '' OR group_name = $5)
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
