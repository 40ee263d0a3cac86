-- Timers. A timer that fires is removed and its message appended in one transaction.

-- name: timers_schedule
-- Schedule timers of a producer ($8), or schedule them again; whether each was there before, and when it is due.
INSERT INTO queen.timers AS t (queue, key, id, partition, transaction_id, body, deliver_at, producer_sub)
SELECT i.queue, i.key, i.id, i.partition, i.transaction_id, i.body,
    clock_timestamp() + make_interval(secs => i.delay), $8
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::bytea[], $7::float8[])
    AS i (queue, key, id, partition, transaction_id, body, delay)
ORDER BY i.queue, i.key
ON CONFLICT (queue, key) DO UPDATE SET id = excluded.id, partition = excluded.partition,
    transaction_id = excluded.transaction_id, body = excluded.body, deliver_at = excluded.deliver_at,
    scheduled_at = excluded.scheduled_at, producer_sub = excluded.producer_sub, attempts = 0, last_error = NULL
RETURNING t.queue, t.key, t.xmax::text <> '0' AS rescheduled, t.deliver_at;

-- name: timers_cancel
-- Remove timers; those that were pending.
DELETE FROM queen.timers t USING unnest($1::text[], $2::text[]) AS i (queue, key)
WHERE t.queue = i.queue AND t.key = i.key RETURNING t.queue, t.key, t.transaction_id;

-- name: timers_peek
-- A timer.
SELECT * FROM queen.timers WHERE queue = $1 AND key = $2;

-- name: timers_list
-- Timers of a queue by key, after one of them.
SELECT key, id, partition, transaction_id, deliver_at, scheduled_at, attempts, last_error
FROM queen.timers WHERE queue = $1 AND key > $2 ORDER BY key LIMIT $3;

-- name: timers_page
-- A page ($3, $4) of the timers of a queue ($1; empty: of all) whose keys start with a text ($2), the next to be due first.
SELECT queue, key, id, partition, transaction_id, deliver_at, scheduled_at, attempts, last_error
FROM queen.timers WHERE ($1::text = '' OR queue = $1) AND starts_with(key, $2)
ORDER BY deliver_at, queue, key LIMIT $3 OFFSET $4;

-- name: timers_count
-- How many timers a queue ($1; empty: all) has whose keys start with a text ($2), counted up to $3.
SELECT count(*) AS found FROM (
    SELECT FROM queen.timers WHERE ($1::text = '' OR queue = $1) AND starts_with(key, $2) LIMIT $3
) t;

-- name: timer_stats
-- How many timers wait, how many of them are due, and for how many seconds the first of these has been.
SELECT count(*) AS pending, count(*) FILTER (WHERE deliver_at <= clock_timestamp()) AS due,
    greatest(0, coalesce(extract(epoch FROM clock_timestamp() - min(deliver_at)), 0))::float8 AS lag FROM queen.timers;

-- name: timers_next
-- In how many seconds the next timer is due; no row when there is none.
SELECT extract(epoch FROM deliver_at - clock_timestamp())::float8 AS due_in FROM queen.timers ORDER BY deliver_at LIMIT 1;

-- name: timers_take
-- Remove timers that are due, the earliest first, but those of some queues ($2), so that their messages are appended.
WITH due AS MATERIALIZED (
    SELECT queue, key FROM queen.timers
    WHERE deliver_at <= clock_timestamp() AND queue <> ALL ($2::text[])
    ORDER BY deliver_at LIMIT $1 FOR UPDATE SKIP LOCKED
)
DELETE FROM queen.timers t USING due d WHERE t.queue = d.queue AND t.key = d.key
RETURNING nextval(pg_get_serial_sequence('queen.inbox', 'id')) AS id, t.queue, t.key, t.partition, t.transaction_id, t.body,
    t.deliver_at, t.producer_sub;

-- name: timers_take_one
-- Remove one timer that is due, to append its message.
DELETE FROM queen.timers WHERE queue = $1 AND key = $2 AND deliver_at <= clock_timestamp()
RETURNING nextval(pg_get_serial_sequence('queen.inbox', 'id')) AS id, queue, key, partition, transaction_id, body, deliver_at,
    producer_sub;

-- name: timers_delay
-- A timer could not be pushed: it is tried again after some seconds.
UPDATE queen.timers SET attempts = attempts + 1, last_error = $3,
    deliver_at = clock_timestamp() + make_interval(secs => least(300, 2 ^ least(attempts, 10)))
WHERE queue = $1 AND key = $2;

-- name: timers_remove_queue
-- Remove the timers of a queue.
DELETE FROM queen.timers WHERE queue = $1;

-- name: timers_remove_idle
-- The same without waiting for those that fire right now.
WITH idle AS MATERIALIZED (
    SELECT queue, key FROM queen.timers WHERE queue = $1 FOR UPDATE SKIP LOCKED
)
DELETE FROM queen.timers t USING idle i WHERE t.queue = i.queue AND t.key = i.key;
