-- The inbox of pushes from SQL. One session at a time takes rows, by rounds: a round takes what was visible at one moment
-- (a snapshot), in the order of the ids. All that was visible at the moment of the round before has been taken then, so
-- what there is to take has an id above all those ($1), or is of a transaction that was running at that moment: one of $2,
-- or one from $4 on, which is the end of that snapshot, and below $5, the transaction that took the highest id. So the
-- rows that were removed, and that PostgreSQL cannot clean up while some transaction lasts, are not walked over.

-- name: inbox_look
-- The moment of a new round, and whether anything waits. $3: queues that are held.
SELECT pg_current_snapshot() AS snapshot,
    EXISTS (SELECT FROM queen.inbox WHERE id > $1::bigint AND queue <> ALL ($3::text[]))
    OR EXISTS (SELECT FROM queen.inbox WHERE xid = ANY ($2::xid8[]) AND queue <> ALL ($3::text[]))
    OR EXISTS (SELECT FROM queen.inbox WHERE xid >= $4::xid8 AND xid < $5::xid8 AND id <= $1::bigint
        AND queue <> ALL ($3::text[])) AS waiting;

-- name: inbox_take
-- Take rows of a round, whose moment is $6: those with ids above $7, at most $8 of them and $9 bytes, and one more.
-- `id + 0` has rows found by their transaction: by id, all that were taken and not yet cleaned up would be walked over.
WITH candidates AS MATERIALIZED (
    SELECT c.place, c.id, sum(c.nbytes) OVER (ORDER BY c.id ROWS UNBOUNDED PRECEDING) - c.nbytes AS before
    FROM (
        SELECT late.* FROM unnest($2::xid8[]) AS x (xid) CROSS JOIN LATERAL (
            SELECT i.ctid AS place, i.id, octet_length(i.body) AS nbytes FROM queen.inbox i
            WHERE i.xid = x.xid AND i.id > $7::bigint AND i.id <= $1::bigint AND i.queue <> ALL ($3::text[])
                AND pg_visible_in_snapshot(i.xid, $6::pg_snapshot)
            ORDER BY i.id LIMIT $8
        ) late
        UNION ALL
        SELECT new.* FROM (
            SELECT i.ctid AS place, i.id, octet_length(i.body) AS nbytes FROM queen.inbox i
            WHERE i.xid >= $4::xid8 AND i.xid < $5::xid8 AND i.id > $7::bigint AND i.id <= $1::bigint
                AND i.queue <> ALL ($3::text[]) AND pg_visible_in_snapshot(i.xid, $6::pg_snapshot)
            ORDER BY i.id + 0 LIMIT $8
        ) new
        UNION ALL
        SELECT fresh.* FROM (
            SELECT i.ctid AS place, i.id, octet_length(i.body) AS nbytes FROM queen.inbox i
            WHERE i.id > greatest($1::bigint, $7::bigint) AND i.queue <> ALL ($3::text[])
                AND pg_visible_in_snapshot(i.xid, $6::pg_snapshot)
            ORDER BY i.id LIMIT $8
        ) fresh
        ORDER BY id LIMIT $8
    ) c
)
DELETE FROM queen.inbox i USING candidates c WHERE i.ctid = c.place AND c.before < $9::bigint
RETURNING pg_current_xact_id() AS taken_by, i.xid, i.id, i.pushed_at, i.trace_id, i.count, i.topic, i.queue, i.partition, i.transaction_ids, i.body;

-- name: inbox_take_all
-- Take whatever is visible now, oldest first, at most so many rows ($2) and bytes ($3); $1: queues that are held.
WITH candidates AS MATERIALIZED (
    SELECT c.place, sum(c.nbytes) OVER (ORDER BY c.id ROWS UNBOUNDED PRECEDING) - c.nbytes AS before
    FROM (
        SELECT i.ctid AS place, i.id, octet_length(i.body) AS nbytes FROM queen.inbox i
        WHERE i.queue <> ALL ($1::text[]) ORDER BY i.id LIMIT $2
    ) c
)
DELETE FROM queen.inbox i USING candidates c WHERE i.ctid = c.place AND c.before < $3::bigint
RETURNING pg_current_xact_id() AS taken_by, i.xid, i.id, i.pushed_at, i.trace_id, i.count, i.topic, i.queue, i.partition, i.transaction_ids, i.body;

-- name: inbox_take_some
-- Take rows by their ids ($1), but none of queues that are held ($2).
DELETE FROM queen.inbox WHERE id = ANY ($1::bigint[]) AND queue <> ALL ($2::text[])
RETURNING xid, id, pushed_at, trace_id, count, topic, queue, partition, transaction_ids, body;

-- name: inbox_refuse
-- Quarantine a row that can never be appended, with the reason.
WITH gone AS (
    DELETE FROM queen.inbox WHERE id = $1 RETURNING *
), counted AS (
    UPDATE queen.inbox_totals t SET refused = t.refused + g.count FROM gone g
)
INSERT INTO queen.inbox_refused (id, pushed_at, reason, trace_id, topic, queue, partition, transaction_ids, body)
SELECT id, pushed_at, $2, trace_id, topic, queue, partition, transaction_ids, body FROM gone;

-- name: inbox_forward
-- Put a row of another shard ($1) into this inbox, unless that was done before; the notes of that are kept for a week.
WITH old AS (
    DELETE FROM queen.inbox_forwarded WHERE forwarded_at < clock_timestamp() - interval '7 days'
), first AS (
    INSERT INTO queen.inbox_forwarded (shard, id) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING id
), sent AS (
    INSERT INTO queen.inbox (pushed_at, trace_id, count, topic, queue, partition, transaction_ids, body)
    SELECT $3::timestamptz, $4::uuid, $5::integer, $6::boolean, $7::text, $8::text, $9::text[], $10::text FROM first
    RETURNING id
)
SELECT queen.wake_inbox() FROM sent;

-- name: inbox_count
-- Count what was appended, what were duplicates, and what became dead letters.
UPDATE queen.inbox_totals SET appended = appended + $1, duplicates = duplicates + $2, dead_letters = dead_letters + $3;

-- name: inbox_dead_items
-- Keep items that were refused as dead letters of their topics.
INSERT INTO queen.topic_dead_letters (id, topic_id, priority, retries, is_json, deliver_after, created_at, moved_at,
    idempotency_key, last_error, metadata, payload)
SELECT i.id, i.topic_id, i.priority, 0, i.is_json, coalesce(i.deliver_after, now()), now(), clock_timestamp(), i.key, i.error,
    i.metadata, i.payload
FROM unnest($1::bigint[], $2::integer[], $3::integer[], $4::boolean[], $5::timestamptz[], $6::text[], $7::text[],
    $8::bytea[], $9::bytea[]) AS i (id, topic_id, priority, is_json, deliver_after, key, error, metadata, payload);

-- name: inbox_set_awake
-- 1: pushes have to notify; 2: they need not. Nothing depends on it after a crash, so the disk is not waited for.
SELECT set_config('synchronous_commit', 'off', true), setval('queen.inbox_awake', $1::bigint);

-- name: inbox_writers
-- Transactions that have written to the inbox and are not over.
SELECT l.virtualtransaction AS writer FROM pg_locks l
WHERE l.locktype = 'relation' AND l.relation = 'queen.inbox'::regclass AND l.mode = 'RowExclusiveLock' AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.pid IS DISTINCT FROM pg_backend_pid();

-- name: inbox_stats
-- What waits in the inbox, for how long, and what has left it; a million rows are counted at most.
SELECT (SELECT count(*) FROM (SELECT FROM queen.inbox LIMIT 1000000) i) AS rows,
    coalesce((SELECT extract(epoch FROM clock_timestamp() - pushed_at) FROM queen.inbox ORDER BY id LIMIT 1), 0)::float8
        AS oldest,
    t.appended, t.duplicates, t.dead_letters, t.refused
FROM queen.inbox_totals t;

-- name: inbox_last_id
-- The highest id that was drawn (0: none), and then a transaction that is younger than all that drew one up to it.
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('queen.inbox', 'id')::regclass), 0) AS last_id,
    pg_current_xact_id() AS taken_by;
