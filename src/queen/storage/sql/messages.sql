-- Looking at single messages: listing, finding, deleting.

-- name: message_spans
-- The partitions that hold messages of a time, newest first, each with the span of offsets that has the wanted status;
-- and over all of them, how many messages there are and which groups read them. There is always at least one row.
-- $1 queues or null; $2 partition name or null; $3 from; $4 to (excluded) or null; $5 status or null; $6 the group of queue
-- mode; $7 how many partitions to return; $8 how many to look at, those written to last, or null: all. `looked_at` says how
-- many that were, and `least_at` when the last of them was written to. Offsets at the edges of the time are found by
-- halving, not by reading it all.
WITH looked AS MATERIALIZED (
    SELECT id, queue_id, name, floor_offset, next_offset, last_at FROM queen.partitions
    WHERE ($1::integer[] IS NULL OR queue_id = ANY($1::integer[])) AND ($2::text IS NULL OR name = $2)
        AND next_offset > floor_offset AND last_at >= $3::timestamptz
    ORDER BY CASE WHEN $8::bigint IS NOT NULL THEN last_at END DESC LIMIT $8
), placed AS MATERIALIZED (
    SELECT p.id, p.queue_id, p.name, p.next_offset, p.last_at, e.low, e.high, k.queue_mode, k.groups, k.leased,
        coalesce(k.queue_committed, k.bus_committed, 0) AS consumed
    FROM looked p
    CROSS JOIN LATERAL (
        WITH RECURSIVE halving (edge, moment, low, high) AS (
            SELECT f.edge, f.moment, f.low, f.high
            FROM (
                SELECT 1 AS edge, $3::timestamptz AS moment, p.floor_offset AS low,
                    CASE WHEN (
                        SELECT s.created_at FROM queen.segments s
                        WHERE s.partition_id = p.id AND s.base_offset <= p.floor_offset
                        ORDER BY s.base_offset DESC LIMIT 1
                    ) >= $3 THEN p.floor_offset ELSE p.next_offset END AS high
                UNION ALL
                SELECT 2, $4::timestamptz,
                    CASE WHEN $4 IS NULL OR p.last_at < $4 THEN p.next_offset ELSE p.floor_offset END, p.next_offset
            ) f
            UNION ALL
            SELECT h.edge, h.moment,
                CASE WHEN s.created_at >= h.moment THEN h.low
                    ELSE least(h.high, greatest(h.middle + 1, s.base_offset + s.count)) END,
                CASE WHEN s.created_at >= h.moment THEN greatest(h.low, least(h.middle, s.base_offset)) ELSE h.high END
            FROM (SELECT *, (low + high) / 2 AS middle FROM halving WHERE low < high) h
            LEFT JOIN LATERAL (
                SELECT g.base_offset, g.count, g.created_at FROM queen.segments g
                WHERE g.partition_id = p.id AND g.base_offset <= h.middle ORDER BY g.base_offset DESC LIMIT 1
            ) s ON true
        )
        SELECT max(low) FILTER (WHERE edge = 1) AS low, max(low) FILTER (WHERE edge = 2) AS high
        FROM halving WHERE low >= high
    ) e
    CROSS JOIN LATERAL (
        SELECT min(c.committed) FILTER (WHERE c.group_id = $6) AS queue_committed,
            min(c.committed) FILTER (WHERE c.group_id <> $6) AS bus_committed,
            coalesce(bool_or(c.group_id = $6), false) AS queue_mode,
            coalesce(bool_or(c.group_id = $6 AND c.lease_id IS NOT NULL AND c.lease_until > clock_timestamp()), false)
                AS leased,
            array_agg(c.group_id) FILTER (WHERE c.group_id <> $6) AS groups
        FROM queen.cursors c WHERE c.partition_id = p.id
    ) k
    WHERE e.low < e.high
), wanted AS MATERIALIZED (
    SELECT w.*, w.last_offset - w.first_offset - CASE WHEN $5::text IS NULL THEN 0 ELSE (
        SELECT count(DISTINCT d.message_offset) FROM queen.dead_letters d
        WHERE d.partition_id = w.id AND d.message_offset >= w.first_offset AND d.message_offset < w.last_offset
    ) END AS messages
    FROM (
        SELECT id, queue_id, name, next_offset, last_at,
            CASE WHEN $5::text IS NULL OR $5::text = 'completed' THEN low ELSE greatest(low, consumed) END AS first_offset,
            CASE WHEN $5::text = 'completed' THEN least(high, consumed)
                WHEN $5::text = 'pending' AND leased OR $5::text = 'processing' AND NOT leased THEN low
                ELSE high END AS last_offset
        FROM placed
    ) w
    WHERE w.first_offset < w.last_offset
)
SELECT t.total, t.queue_mode, t.groups, t.looked_at, t.least_at, n.id, n.queue_id, n.name, n.first_offset, n.last_offset, n.messages, n.newest_at
FROM (
    SELECT (SELECT coalesce(sum(messages), 0)::bigint FROM wanted) AS total,
        (SELECT count(*) FROM looked) AS looked_at, (SELECT min(last_at) FROM looked) AS least_at,
        (SELECT coalesce(bool_or(queue_mode), false) FROM placed) AS queue_mode,
        (SELECT count(DISTINCT g.id) FROM placed, unnest(placed.groups) AS g (id)) AS groups
) t
LEFT JOIN LATERAL (
    SELECT w.id, w.queue_id, w.name, w.first_offset, w.last_offset, w.messages,
        CASE WHEN w.last_offset = w.next_offset THEN w.last_at ELSE coalesce((
            SELECT s.created_at FROM queen.segments s
            WHERE s.partition_id = w.id AND s.base_offset < w.last_offset ORDER BY s.base_offset DESC LIMIT 1
        ), w.last_at) END AS newest_at
    FROM wanted w WHERE w.messages > 0
    ORDER BY newest_at DESC, w.id LIMIT $7
) n ON true;

-- name: newest_segments
-- The newest segments of spans of offsets, without their bodies; with $5 the offsets of dead letters in them.
SELECT i.slot, s.base_offset, s.count, s.created_at, CASE WHEN $5::boolean THEN ARRAY(
        SELECT DISTINCT d.message_offset FROM queen.dead_letters d
        WHERE d.partition_id = i.partition_id AND d.message_offset >= s.base_offset
            AND d.message_offset < s.base_offset + s.count
    ) ELSE '{}' END AS dead
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::integer[]) WITH ORDINALITY
    AS i (partition_id, first_offset, last_offset, most, slot)
CROSS JOIN LATERAL (
    SELECT g.base_offset, g.count, g.created_at FROM queen.segments g
    WHERE g.partition_id = i.partition_id AND g.base_offset < i.last_offset
        AND g.base_offset >= coalesce((SELECT b.base_offset FROM queen.segments b
            WHERE b.partition_id = i.partition_id AND b.base_offset <= i.first_offset
            ORDER BY b.base_offset DESC LIMIT 1), i.first_offset)
    ORDER BY g.base_offset DESC LIMIT i.most
) s
ORDER BY i.slot, s.base_offset DESC;

-- name: dead_messages
-- Messages that are dead letters and still in their partition, newest first, with how many there are in all.
-- $1 queues; $2 partition name or null; $3 from; $4 to (excluded) or null; $5 limit; $6 offset.
SELECT t.total, d.partition_id, d.message_offset
FROM (
    SELECT count(DISTINCT (d.partition_id, d.message_offset)) AS total
    FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
    WHERE d.queue_id = ANY($1::integer[]) AND ($2::text IS NULL OR p.name = $2) AND d.message_offset >= p.floor_offset
        AND d.original_created_at >= $3::timestamptz AND ($4::timestamptz IS NULL OR d.original_created_at < $4)
) t
LEFT JOIN LATERAL (
    SELECT d.partition_id, d.message_offset, d.original_created_at
    FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
    WHERE d.queue_id = ANY($1) AND ($2 IS NULL OR p.name = $2) AND d.message_offset >= p.floor_offset
        AND d.original_created_at >= $3 AND ($4 IS NULL OR d.original_created_at < $4)
    GROUP BY d.partition_id, d.message_offset, d.original_created_at
    ORDER BY d.original_created_at DESC, d.partition_id, d.message_offset DESC LIMIT $5::bigint OFFSET $6::bigint
) d ON true
ORDER BY d.original_created_at DESC, d.partition_id, d.message_offset DESC;

-- name: search_partitions
-- Partitions of a queue ($1; of a name, $2) by name, from one on ($3; if $4 with it), that hold messages, were written to
-- since a time ($5), and (if $6) have dead letters.
SELECT p.id, p.name, p.floor_offset, p.next_offset FROM queen.partitions p
WHERE p.queue_id = $1 AND ($2::text IS NULL OR p.name = $2) AND p.name >= $3 AND ($4::boolean OR p.name > $3)
    AND p.next_offset > p.floor_offset AND ($5::timestamptz IS NULL OR p.last_at >= $5)
    AND (NOT $6::boolean OR EXISTS (SELECT FROM queen.dead_letters d WHERE d.partition_id = p.id))
ORDER BY p.name LIMIT $7;

-- name: search_segments
-- The newest segments of a partition ($1) between two offsets, up to so many ($4) and so many bytes ($5), at least one;
-- if $6, only those with dead letters.
SELECT base_offset, count, created_at, ids, body FROM (
    SELECT s.*, sum(octet_length(s.body)) OVER (ORDER BY s.base_offset DESC) - octet_length(s.body) AS nbytes
    FROM (
        SELECT g.base_offset, g.count, g.created_at, g.ids, g.body FROM queen.segments g
        WHERE g.partition_id = $1 AND g.base_offset < $3 AND g.base_offset >= coalesce((
                SELECT b.base_offset FROM queen.segments b
                WHERE b.partition_id = $1 AND b.base_offset <= $2 ORDER BY b.base_offset DESC LIMIT 1
            ), $2)
            AND (NOT $6::boolean OR EXISTS (SELECT FROM queen.dead_letters d WHERE d.partition_id = $1
                AND d.message_offset >= g.base_offset AND d.message_offset < g.base_offset + g.count))
        ORDER BY g.base_offset DESC LIMIT $4
    ) s
) t
WHERE nbytes < $5::bigint ORDER BY base_offset DESC;

-- name: dead_between
-- The offsets of messages of a partition, from one to another, that are dead letters.
SELECT DISTINCT message_offset FROM queen.dead_letters
WHERE partition_id = $1 AND message_offset >= $2 AND message_offset < $3;

-- name: dead_among
-- Which of these messages are dead letters.
SELECT DISTINCT d.partition_id, d.message_offset
FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, message_offset)
JOIN queen.dead_letters d ON d.partition_id = i.partition_id AND d.message_offset = i.message_offset;

-- name: group_modes
-- Whether queue mode reads partitions of queues, and how many groups do.
SELECT coalesce(bool_or(c.group_id = $3), false) AS queue_mode,
    count(DISTINCT c.group_id) FILTER (WHERE c.group_id <> $3) AS groups
FROM queen.partitions p JOIN queen.cursors c ON c.partition_id = p.id
WHERE p.queue_id = ANY($1::integer[]) AND ($2::text IS NULL OR p.name = $2) AND p.last_at >= $4::timestamptz;

-- name: segments_of
-- In which segment each message lies, and how big its body is.
SELECT i.slot, s.base_offset, s.nbytes
FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS i (partition_id, message_offset, slot)
CROSS JOIN LATERAL (
    SELECT g.base_offset, g.count, octet_length(g.body) AS nbytes FROM queen.segments g
    WHERE g.partition_id = i.partition_id AND g.base_offset <= i.message_offset ORDER BY g.base_offset DESC LIMIT 1
) s
WHERE i.message_offset < s.base_offset + s.count;

-- name: segments_at
-- Whole segments by where they start.
SELECT s.partition_id, s.base_offset, s.created_at, s.ids, s.body
FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, base_offset)
JOIN queen.segments s ON s.partition_id = i.partition_id AND s.base_offset = i.base_offset;

-- name: newest_segment_with
-- The newest segment below an offset that may hold a transaction id, found by the hash of the id.
SELECT base_offset, created_at, ids, body FROM queen.segments
WHERE partition_id = $1 AND base_offset < $2 AND base_offset + count > $3 AND position($4::bytea IN ids) > 0
ORDER BY base_offset DESC LIMIT 1;

-- name: partition_place
-- One partition: which queue it belongs to and what is left of it.
SELECT p.id, p.name, p.floor_offset, q.name AS queue_name
FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE p.id = $1;

-- name: cursors_of
-- Where every group stands on partitions, and until when it leases them.
SELECT c.partition_id, g.name, c.committed,
    CASE WHEN c.lease_id IS NOT NULL AND c.lease_until > clock_timestamp() THEN c.lease_until END AS leased_until
FROM queen.cursors c JOIN queen.groups g ON g.id = c.group_id
WHERE c.partition_id = ANY($1::bigint[]) ORDER BY c.partition_id, g.name;

-- name: lock_segment_of
-- The segment that holds an offset, locked against other rewrites.
SELECT base_offset, created_at, ids, body FROM queen.segments
WHERE partition_id = $1 AND base_offset <= $2 ORDER BY base_offset DESC LIMIT 1 FOR UPDATE;

-- name: rewrite_segment
-- Replace the body of a locked segment.
UPDATE queen.segments SET body = $3 WHERE partition_id = $1 AND base_offset = $2;
