-- Reading partitions by offset, and finding those that were written to; for readers that keep their positions themselves.

-- name: fetch_ends
-- Where partitions, by the names of their queues and their own, begin and end.
SELECT i.slot, p.id, p.floor_offset, p.next_offset
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS i (queue, partition, slot)
JOIN queen.queues q ON q.name = i.queue
JOIN queen.partitions p ON p.queue_id = q.id AND p.name = i.partition
ORDER BY i.slot;

-- name: fetch_sizes
-- The segments of partitions from an offset on, at most $3 of each, and how many bytes they have.
SELECT i.slot, i.partition_id, s.base_offset, s.nbytes
FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS i (partition_id, from_offset, slot)
CROSS JOIN LATERAL (
    SELECT g.base_offset, octet_length(g.body) AS nbytes FROM queen.segments g
    WHERE g.partition_id = i.partition_id AND g.base_offset >= coalesce((
        SELECT b.base_offset FROM queen.segments b
        WHERE b.partition_id = i.partition_id AND b.base_offset <= i.from_offset ORDER BY b.base_offset DESC LIMIT 1
    ), i.from_offset)
    ORDER BY g.base_offset LIMIT $3
) s
ORDER BY i.slot, s.base_offset;

-- name: changed_partitions
-- A page of the partitions of a queue ($1), after an id ($2), that were written to at a time ($3) or later.
SELECT p.id, p.name, p.next_offset, p.floor_offset, coalesce(p.last_at, p.created_at) AS last_at
FROM queen.partitions p
WHERE (p.queue_id, p.id) > ($1, $2::bigint) AND p.queue_id <= $1
    AND ($3::timestamptz IS NULL OR p.last_at >= $3)
ORDER BY p.queue_id, p.id LIMIT $4;

-- name: safe_time
-- A time before which all that was written is visible: what transactions that are running write has the time of when they
-- began, or a later one.
SELECT least(clock_timestamp(), min(xact_start)) AS safe_time
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL;
