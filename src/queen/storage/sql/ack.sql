-- Acknowledging: the cursor moves, the lease ends.

-- name: ack
-- The common case: a live lease is acked as completed up to an offset; reaching its end ends it.
UPDATE queen.cursors c SET
    committed = greatest(c.committed, i.upto),
    total_consumed = c.total_consumed + greatest(0, i.upto - c.committed),
    total_batches = c.total_batches + (i.upto >= c.lease_end)::integer,
    last_consumed_at = clock_timestamp(),
    lease_id = CASE WHEN i.upto >= c.lease_end THEN NULL ELSE c.lease_id END,
    lease_until = CASE WHEN i.upto >= c.lease_end THEN NULL ELSE c.lease_until END,
    finished_lease_id = CASE WHEN i.upto >= c.lease_end THEN c.lease_id ELSE c.finished_lease_id END,
    attempts = CASE WHEN i.upto >= c.lease_end THEN 0 ELSE c.attempts END
FROM unnest($1::bigint[], $2::integer[], $3::uuid[], $4::bigint[]) WITH ORDINALITY
    AS i (partition_id, group_id, lease_id, upto, slot)
JOIN queen.partitions p ON p.id = i.partition_id
WHERE c.partition_id = i.partition_id AND c.group_id = i.group_id
    AND c.lease_id = i.lease_id AND c.lease_until > clock_timestamp() AND i.upto <= c.lease_end
RETURNING i.slot, c.lease_id IS NULL AS released, p.next_offset - c.committed AS available, c.committed;

-- name: lock_cursors
-- Lock cursors in order, with what a decision about them needs.
SELECT c.partition_id, c.group_id, c.committed, c.lease_id::text AS lease_id, c.lease_start, c.lease_end,
    c.lease_until > clock_timestamp() AS live, c.finished_lease_id::text AS finished_lease_id, c.attempts
FROM queen.cursors c
JOIN unnest($1::bigint[], $2::integer[]) AS i (partition_id, group_id)
    ON c.partition_id = i.partition_id AND c.group_id = i.group_id
ORDER BY c.partition_id, c.group_id FOR UPDATE OF c;

-- name: save_cursors
-- Write back what was decided about locked cursors.
UPDATE queen.cursors c SET
    committed = i.committed,
    total_consumed = c.total_consumed + i.consumed,
    total_batches = c.total_batches + i.finished::integer,
    last_consumed_at = CASE WHEN i.consumed > 0 THEN clock_timestamp() ELSE c.last_consumed_at END,
    finished_lease_id = CASE WHEN i.finished THEN c.lease_id ELSE c.finished_lease_id END,
    lease_id = CASE WHEN i.released THEN NULL ELSE c.lease_id END,
    lease_until = CASE WHEN NOT i.released THEN c.lease_until
        WHEN i.wait > 0 THEN clock_timestamp() + make_interval(secs => i.wait) END,
    attempts = i.attempts
FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[], $5::boolean[], $6::boolean[], $7::float8[],
        $8::integer[]) WITH ORDINALITY
    AS i (partition_id, group_id, committed, consumed, released, finished, wait, attempts, slot)
JOIN queen.partitions p ON p.id = i.partition_id
WHERE c.partition_id = i.partition_id AND c.group_id = i.group_id
RETURNING i.slot, p.next_offset - c.committed AS available;

-- name: leased_ids
-- The message ids in the spans that groups lease (or last leased) on partitions.
SELECT c.partition_id, c.group_id, c.lease_start, c.lease_end, s.base_offset, s.count, s.ids
FROM unnest($1::bigint[], $2::integer[]) AS i (partition_id, group_id)
JOIN queen.cursors c ON c.partition_id = i.partition_id AND c.group_id = i.group_id
JOIN LATERAL (
    SELECT g.base_offset, g.count, g.ids FROM queen.segments g
    WHERE g.partition_id = c.partition_id AND g.base_offset < c.lease_end
        AND g.base_offset >= coalesce((SELECT b.base_offset FROM queen.segments b
            WHERE b.partition_id = c.partition_id AND b.base_offset <= c.lease_start
            ORDER BY b.base_offset DESC LIMIT 1), c.lease_start)
) s ON true;

-- name: insert_dead_letters
-- Keep copies of messages that are given up on.
INSERT INTO queen.dead_letters (queue_id, partition_id, message_offset, group_id, message_id, transaction_id, trace_id,
    producer_sub, body, error_message, retry_count, original_created_at)
SELECT * FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::integer[], $5::uuid[], $6::text[], $7::text[],
    $8::text[], $9::bytea[], $10::text[], $11::integer[], $12::timestamptz[])
ON CONFLICT (partition_id, message_offset, group_id) DO UPDATE
    SET error_message = excluded.error_message, retry_count = excluded.retry_count, failed_at = excluded.failed_at;

-- name: renew
-- Make live leases last longer; never shorter.
UPDATE queen.cursors c
SET lease_until = greatest(c.lease_until, clock_timestamp() + make_interval(secs => i.seconds))
FROM unnest($1::bigint[], $2::uuid[], $3::float8[]) WITH ORDINALITY AS i (partition_id, lease_id, seconds, slot)
WHERE c.partition_id = i.partition_id AND c.lease_id = i.lease_id AND c.lease_until > clock_timestamp()
RETURNING i.slot, c.lease_until;

-- name: lease_partitions
-- Every partition of a queue that a lease holds, found from one of them.
SELECT c.partition_id
FROM queen.partitions one
JOIN queen.partitions p ON p.queue_id = one.queue_id
JOIN queen.cursors c ON c.partition_id = p.id
WHERE one.id = $1 AND c.lease_id = $2;
