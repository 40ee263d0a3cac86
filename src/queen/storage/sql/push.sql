-- Appending segments. Partition rows are locked in ascending id order, so pushes cannot deadlock.

-- name: push
-- Append segments to partitions, all or nothing: only when every partition still ends where the caller believes.
-- $1 partition ids, ascending; $2 the offset each must be at; $3 messages for each; $4-$8 the segments:
-- position of their partition in $1, base offset, count, ids, body.
WITH locked AS MATERIALIZED (
    SELECT p.id, p.next_offset, greatest(p.last_at, clock_timestamp()) AS at
    FROM queen.partitions p WHERE p.id = ANY($1::bigint[]) ORDER BY p.id FOR UPDATE
), gate AS MATERIALIZED (
    SELECT coalesce(array_agg(next_offset) = $2::bigint[], false) AS open, array_agg(id) AS ids,
        array_agg(next_offset) AS offsets, array_agg(at) AS at
    FROM locked
), moved AS (
    UPDATE queen.partitions p SET next_offset = p.next_offset + i.n, last_at = g.at[i.slot]
    FROM gate g, unnest($1::bigint[], $3::integer[]) WITH ORDINALITY AS i (id, n, slot)
    WHERE g.open AND p.id = i.id
), stored AS (
    INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)
    SELECT ($1::bigint[])[s.slot], s.base_offset, s.count, g.at[s.slot], s.ids, s.body
    FROM gate g, unnest($4::integer[], $5::bigint[], $6::integer[], $7::bytea[], $8::bytea[])
        AS s (slot, base_offset, count, ids, body)
    WHERE g.open
)
SELECT open, ids, offsets, at FROM gate;

-- name: push_one
-- The same for a single segment, cheaper.
WITH moved AS (
    UPDATE queen.partitions p
    SET next_offset = p.next_offset + $3::integer, last_at = greatest(p.last_at, clock_timestamp())
    WHERE p.id = $1::bigint AND p.next_offset = $2::bigint
    RETURNING p.last_at
)
INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)
SELECT $1::bigint, $2::bigint, $3::integer, m.last_at, $4::bytea, $5::bytea FROM moved m
RETURNING created_at;

-- name: lock_partitions
-- Lock partitions in order, and return where they end.
SELECT id, next_offset FROM queen.partitions WHERE id = ANY($1::bigint[]) ORDER BY id FOR UPDATE;

-- name: segment_ids_from
-- What was appended to partitions at or after an offset each, without the bodies.
SELECT s.partition_id, s.base_offset, s.count, s.created_at, s.ids
FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, from_offset)
JOIN queen.segments s ON s.partition_id = i.partition_id AND s.base_offset >= i.from_offset;

-- name: segment_ids_before
-- A page of a partition's segments below an offset, newest first, without the bodies.
SELECT base_offset, count, created_at, ids, created_at >= clock_timestamp() - make_interval(secs => $4) AS recent
FROM queen.segments WHERE partition_id = $1 AND base_offset < $2 ORDER BY base_offset DESC LIMIT $3;

-- name: segment_at
-- The segment that holds an offset.
SELECT partition_id, base_offset, count, created_at, ids, body FROM queen.segments
WHERE partition_id = $1 AND base_offset <= $2 ORDER BY base_offset DESC LIMIT 1;

-- name: partition_histories
-- Where partitions end, and what was appended to each inside a window of seconds: at most $3 segments, the newest first,
-- without the bodies. A partition without any has one row all the same.
SELECT p.id, p.next_offset, s.base_offset, s.count, s.created_at, s.ids
FROM unnest($1::bigint[], $2::float8[]) AS i (id, seconds)
JOIN queen.partitions p ON p.id = i.id
LEFT JOIN LATERAL (
    SELECT base_offset, count, created_at, ids FROM queen.segments
    WHERE partition_id = p.id AND base_offset < p.next_offset ORDER BY base_offset DESC LIMIT $3
) s ON s.created_at >= clock_timestamp() - make_interval(secs => i.seconds);

-- name: lock_queue
-- Only one push at a time may count and fill a queue with a size limit.
SELECT pg_advisory_xact_lock(hashtextextended('queen.max_size', $1::bigint));

-- name: queue_pending
-- Messages of a queue that its slowest group has not consumed; all of them without any group.
SELECT coalesce(sum(p.next_offset - greatest(p.floor_offset, coalesce(c.committed, 0))), 0)::bigint AS pending
FROM queen.partitions p
LEFT JOIN LATERAL (SELECT min(committed) AS committed FROM queen.cursors WHERE partition_id = p.id) c ON true
WHERE p.queue_id = $1;
