-- Reading logs by offset, for Spark and other readers of whole queues: nothing is consumed, no lock is taken.

-- name: log_positions
-- The partitions of queues, and where their logs begin and end: nothing at or above the floor was removed.
SELECT q.name AS queue, p.name AS partition, p.id, p.floor_offset, p.next_offset
FROM queen.queues q JOIN queen.partitions p ON p.queue_id = q.id
WHERE q.name = ANY($1::text[])
ORDER BY q.name, p.name;

-- name: log_ends
-- Where the logs of all partitions of queues begin and end, as arrays in the order of the partitions' ids.
SELECT s.queue, array_agg(s.id), array_agg(s.floor_offset), array_agg(s.next_offset)
FROM (
    SELECT q.name AS queue, p.id, p.floor_offset, p.next_offset
    FROM queen.queues q JOIN queen.partitions p ON p.queue_id = q.id
    WHERE q.name = ANY($1::text[])
    ORDER BY q.name, p.id
) s
GROUP BY s.queue ORDER BY s.queue;

-- name: log_partition_names
-- The names of partitions.
SELECT id, name FROM queen.partitions WHERE id = ANY($1::bigint[]);

-- name: log_removed_partitions
-- Where the logs of removed partitions ended, as far as that is remembered.
SELECT partition_id, name, next_offset FROM queen.removed_partitions WHERE partition_id = ANY($1::bigint[]);

-- name: known_queues
-- Which of these queues there are.
SELECT name FROM queen.queues WHERE name = ANY($1::text[]);

-- name: log_spans
-- The segments that hold some offsets, [from, to), of each partition: span by span, in order within each.
-- date_part, because extract computes with numerics, which is a third of what a small segment costs here; it is exact to
-- the microsecond until 2100 and longer.
SELECT r.slot::integer, s.base_offset, s.count, s.micros, s.first_id, s.body
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS r (partition_id, first, upto, slot)
CROSS JOIN LATERAL (
    SELECT g.base_offset, g.count, (date_part('epoch', g.created_at) * 1000000)::bigint AS micros,
        substr(g.ids, 1, 16) AS first_id, g.body
    FROM queen.segments g
    WHERE g.partition_id = r.partition_id AND g.base_offset < r.upto AND g.base_offset >= coalesce((
        SELECT b.base_offset FROM queen.segments b
        WHERE b.partition_id = r.partition_id AND b.base_offset <= r.first ORDER BY b.base_offset DESC LIMIT 1
    ), r.first) AND g.base_offset + g.count > r.first
    ORDER BY g.base_offset
) s;

-- name: log_runs
-- The segments that hold some offsets, [from, to), of each partition: span by span, and one row for each $4 offsets of it.
-- A row has a vector of each column, and the bodies below $5 bytes one after the other. The larger bodies follow it, in
-- order, each in a row in which all else is null.
SELECT r.slot::integer, y.*
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS r (partition_id, first, upto, slot)
CROSS JOIN LATERAL generate_series(coalesce((
    SELECT b.base_offset FROM queen.segments b
    WHERE b.partition_id = r.partition_id AND b.base_offset <= r.first ORDER BY b.base_offset DESC LIMIT 1
), r.first), r.upto - 1, $4::bigint) AS block
CROSS JOIN LATERAL (
    SELECT array_agg(s.base_offset) AS bases, array_agg(s.count) AS counts, array_agg(s.created_at) AS times,
        array_agg(s.size) AS sizes, string_agg(substr(s.ids, 1, 16), '') AS first_ids,
        string_agg(s.body, '') FILTER (WHERE s.size < $5) AS bodies, max(s.size) AS largest
    FROM (
        SELECT g.base_offset, g.count::bigint, g.created_at, g.ids, g.body, octet_length(g.body)::bigint AS size
        FROM queen.segments g
        WHERE g.partition_id = r.partition_id AND g.base_offset >= block
            AND g.base_offset < least(block + $4, r.upto) AND g.base_offset + g.count > r.first
        ORDER BY g.base_offset
    ) s
) x
CROSS JOIN LATERAL (
    SELECT x.bases, x.counts, x.times, x.sizes, x.first_ids, coalesce(x.bodies, '') WHERE x.bases IS NOT NULL
    UNION ALL (
        SELECT NULL, NULL, NULL, NULL, NULL, g.body FROM queen.segments g
        WHERE x.largest >= $5 AND octet_length(g.body) >= $5 AND g.partition_id = r.partition_id
            AND g.base_offset >= block AND g.base_offset < least(block + $4, r.upto)
            AND g.base_offset + g.count > r.first
        ORDER BY g.base_offset
    )
) y;

-- name: log_sizes
-- How big the segments are that hold some offsets, [from, to), of a partition; in order, and only so many.
SELECT g.base_offset, g.count, octet_length(g.body) AS nbytes
FROM queen.segments g
WHERE g.partition_id = $1 AND g.base_offset < $3 AND g.base_offset >= coalesce((
    SELECT b.base_offset FROM queen.segments b
    WHERE b.partition_id = $1 AND b.base_offset <= $2 ORDER BY b.base_offset DESC LIMIT 1
), $2) AND g.base_offset + g.count > $2
ORDER BY g.base_offset LIMIT $4;

-- name: log_span_sizes
-- How big the segments are that hold some offsets, [from, to), of each partition: in order, and only so many of each.
SELECT r.slot::integer, s.base_offset + s.count, s.nbytes
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS r (partition_id, first, upto, slot)
CROSS JOIN LATERAL (
    SELECT g.base_offset, g.count, octet_length(g.body) AS nbytes
    FROM queen.segments g
    WHERE g.partition_id = r.partition_id AND g.base_offset < r.upto AND g.base_offset >= coalesce((
        SELECT b.base_offset FROM queen.segments b
        WHERE b.partition_id = r.partition_id AND b.base_offset <= r.first ORDER BY b.base_offset DESC LIMIT 1
    ), r.first) AND g.base_offset + g.count > r.first
    ORDER BY g.base_offset LIMIT $4
) s;

-- name: spark_ping
-- Whether the connection is alive.
SELECT 1;

-- name: mirror_group
-- Move the cursors of a group (created if need be) to the offsets of a stream, and notify servers, which cache cursors.
-- A partition that a consumer of the group holds is left to it. Partitions of other queues are passed over.
WITH made AS (
    INSERT INTO queen.groups (name) SELECT $1 WHERE NOT EXISTS (SELECT FROM queen.groups WHERE name = $1)
    ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING id
), chosen AS (
    SELECT id FROM made UNION ALL SELECT id FROM queen.groups WHERE name = $1 LIMIT 1
), moved AS (
    INSERT INTO queen.cursors AS c (partition_id, group_id, committed, last_consumed_at)
    SELECT p.id, g.id, i.committed, clock_timestamp()
    FROM unnest($2::bigint[], $3::text[], $4::bigint[]) AS i (partition_id, queue, committed)
    JOIN queen.partitions p ON p.id = i.partition_id
    JOIN queen.queues q ON q.id = p.queue_id AND q.name = i.queue
    CROSS JOIN chosen g
    ORDER BY p.id
    ON CONFLICT (partition_id, group_id) DO UPDATE SET committed = excluded.committed, last_consumed_at =
        excluded.last_consumed_at, total_consumed = c.total_consumed + greatest(0, excluded.committed - c.committed)
    WHERE c.committed <> excluded.committed AND (c.lease_id IS NULL OR c.lease_until < clock_timestamp())
    RETURNING 1
)
INSERT INTO queen.changes (kind, name) SELECT 'g', $1 WHERE EXISTS (SELECT FROM moved);

-- name: dead_letter_rows
-- All dead letters, of some queues ($1) and of one group ($2), or (null) of all.
SELECT q.name, p.name, d.message_offset, d.message_id::text, d.transaction_id, d.trace_id, d.producer_sub, g.name,
    d.error_message, d.retry_count::bigint, d.original_created_at, d.failed_at, d.body
FROM queen.dead_letters d
JOIN queen.queues q ON q.id = d.queue_id
LEFT JOIN queen.partitions p ON p.id = d.partition_id
LEFT JOIN queen.groups g ON g.id = d.group_id
WHERE ($1::text[] IS NULL OR q.name = ANY($1)) AND ($2::text IS NULL OR g.name = $2);

-- name: trace_rows
-- All traces, of some queues ($1) and of one group ($2), or (null) of all.
SELECT q.name, p.name, t.message_offset, t.transaction_id, t.public_id::text, t.group_name, t.event_type,
    ARRAY(SELECT n.name FROM queen.trace_names n WHERE n.trace_id = t.id ORDER BY n.name), t.worker_id, t.created_at, t.data
FROM queen.traces t
JOIN queen.queues q ON q.id = t.queue_id
LEFT JOIN queen.partitions p ON p.id = t.partition_id
WHERE ($1::text[] IS NULL OR q.name = ANY($1)) AND ($2::text IS NULL OR t.group_name = $2);

-- name: topic_item_rows
-- The items of topics, dead ones among them: of a namespace ($1) and a topic ($2), or (null) of all.
SELECT n.name, t.name, i.id, i.status, i.priority::bigint, i.retries::bigint, i.deliver_after, i.leased_until,
    i.lease_owner, i.expires_at, i.created_at, i.first_failed_at, i.idempotency_key, i.last_error, i.metadata, i.is_json,
    i.payload
FROM queen.topic_namespaces n
JOIN queen.topics t ON t.namespace_id = n.id
CROSS JOIN LATERAL (
    SELECT id, CASE WHEN leased_until IS NULL THEN 'ready' ELSE 'leased' END AS status, priority, retries,
        deliver_after, leased_until, lease_owner, expires_at, created_at, first_failed_at, idempotency_key, last_error,
        metadata, is_json, payload
    FROM queen.topic_items WHERE topic_id = t.id
    UNION ALL
    SELECT id, 'dead', priority, retries, deliver_after, NULL, NULL, NULL, created_at, first_failed_at,
        idempotency_key, last_error, metadata, is_json, payload
    FROM queen.topic_dead_letters WHERE topic_id = t.id
) i
WHERE ($1::text IS NULL OR n.name = $1) AND ($2::text IS NULL OR t.name = $2);

-- name: known_topic
-- Whether there is a topic of this name ($2), in a namespace ($1) or (null) in any.
SELECT t.id FROM queen.topics t JOIN queen.topic_namespaces n ON n.id = t.namespace_id
WHERE ($1::text IS NULL OR n.name = $1) AND ($2::text IS NULL OR t.name = $2) LIMIT 1;
