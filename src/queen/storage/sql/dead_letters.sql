-- Dead letters: list, redrive, delete.
-- A filter is $1 queue, $2 group, $3 partition name, $4 failed from, $5 failed to, $6 transaction ids; null: any.

-- name: dead_letters_page
-- Dead letters, newest failure first; once they have $9 bytes, the rest without bodies.
SELECT d.message_id, d.transaction_id, d.partition_id, q.name AS queue_name, p.name AS partition_name,
    g.name AS group_name, d.error_message, d.retry_count, d.trace_id, d.producer_sub, d.original_created_at, d.failed_at,
    CASE WHEN sum(octet_length(d.body)) OVER (ORDER BY d.failed_at DESC, d.id DESC ROWS UNBOUNDED PRECEDING)
        - octet_length(d.body) < $9::bigint THEN d.body END AS body
FROM (
    SELECT d.id FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
    WHERE ($1::integer IS NULL OR d.queue_id = $1) AND ($2::integer IS NULL OR d.group_id = $2)
        AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
        AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::text[] IS NULL OR d.transaction_id = ANY($6))
    ORDER BY d.failed_at DESC, d.id DESC LIMIT $7::bigint OFFSET $8::bigint
) chosen
JOIN queen.dead_letters d ON d.id = chosen.id
JOIN queen.partitions p ON p.id = d.partition_id
JOIN queen.queues q ON q.id = d.queue_id
LEFT JOIN queen.groups g ON g.id = d.group_id
ORDER BY d.failed_at DESC, d.id DESC;

-- name: dead_letter_report
-- What the newest dead letters ($6 of them at most) died of, the most frequent ($7) first; texts that differ in ids, numbers
-- and quoted words alone are one.
WITH chosen AS MATERIALIZED (
    SELECT d.id, d.queue_id, d.group_id, d.partition_id, d.transaction_id, d.error_message, d.retry_count, d.failed_at
    FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
    WHERE ($1::integer IS NULL OR d.queue_id = $1) AND ($2::integer IS NULL OR d.group_id = $2)
        AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
        AND ($5::timestamptz IS NULL OR d.failed_at <= $5)
    ORDER BY d.failed_at DESC, d.id DESC LIMIT $6
), summed AS (
    SELECT queue_id, group_id, left(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
            split_part(error_message, E'\n', 1),
            '[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}', '<uuid>', 'g'),
            '''[^'']*''|"[^"]*"', '<text>', 'g'),
            '\m(0x)?(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\M', '<hex>', 'g'),
            '\d+(\.\d+)?', '<n>', 'g'), 300) AS error,
        count(*) AS found, min(failed_at) AS first_at, max(failed_at) AS last_at, max(retry_count) AS most_retries,
        (array_agg(partition_id ORDER BY failed_at DESC, id DESC))[1] AS partition_id,
        (array_agg(transaction_id ORDER BY failed_at DESC, id DESC))[1] AS transaction_id
    FROM chosen GROUP BY 1, 2, 3
)
SELECT q.name AS queue_name, g.name AS group_name, s.*, (SELECT count(*) FROM chosen) AS total
FROM summed s JOIN queen.queues q ON q.id = s.queue_id LEFT JOIN queen.groups g ON g.id = s.group_id
ORDER BY s.found DESC, s.last_at DESC LIMIT $7;

-- name: count_dead_letters
-- How many dead letters pass a filter, and the id of the newest of them.
SELECT count(*) AS total, coalesce(max(d.id), 0) AS newest_id
FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
WHERE ($1::integer IS NULL OR d.queue_id = $1) AND ($2::integer IS NULL OR d.group_id = $2)
    AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
    AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::text[] IS NULL OR d.transaction_id = ANY($6));

-- name: next_dead_letters
-- The dead letters that failed first, up to an id, without their bodies.
SELECT d.partition_id, d.message_offset, d.producer_sub, octet_length(d.body) AS nbytes
FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
WHERE ($1::integer IS NULL OR d.queue_id = $1) AND ($2::integer IS NULL OR d.group_id = $2)
    AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
    AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::text[] IS NULL OR d.transaction_id = ANY($6))
    AND d.id <= $7::bigint
ORDER BY d.failed_at, d.id LIMIT $8::bigint;

-- name: purge_dead_letters
-- Delete dead letters up to an id, in batches.
WITH doomed AS (
    SELECT d.id FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
    WHERE ($1::integer IS NULL OR d.queue_id = $1) AND ($2::integer IS NULL OR d.group_id = $2)
        AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
        AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::text[] IS NULL OR d.transaction_id = ANY($6))
        AND d.id <= $7::bigint
    ORDER BY d.id LIMIT $8::bigint FOR UPDATE OF d
), gone AS (
    DELETE FROM queen.dead_letters d USING doomed WHERE d.id = doomed.id RETURNING d.id
)
SELECT count(*) AS deleted FROM gone;

-- name: dead_letters_at
-- The dead letters of one message, newest failure first.
SELECT d.*, g.name AS group_name
FROM queen.dead_letters d LEFT JOIN queen.groups g ON g.id = d.group_id
WHERE d.partition_id = $1 AND d.message_offset = $2 ORDER BY d.failed_at DESC, d.id DESC;

-- name: dead_letters_named
-- The dead letters of a transaction id, newest failure first.
SELECT d.*, g.name AS group_name
FROM queen.dead_letters d LEFT JOIN queen.groups g ON g.id = d.group_id
WHERE d.partition_id = $1 AND d.transaction_id = $2 ORDER BY d.failed_at DESC, d.id DESC;

-- name: lock_dead_letters
-- Lock the dead letters of messages (of one group, or of every group), in order.
SELECT d.id, d.partition_id, d.message_offset, d.transaction_id, d.trace_id, d.producer_sub, d.body,
    d.original_created_at
FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, message_offset)
JOIN queen.dead_letters d ON d.partition_id = i.partition_id AND d.message_offset = i.message_offset
WHERE $3::integer IS NULL OR d.group_id = $3
ORDER BY d.id FOR UPDATE OF d;

-- name: delete_dead_letters
-- Dead letters that are locked.
DELETE FROM queen.dead_letters WHERE id = ANY($1::bigint[]);

-- name: delete_dead_letters_at
-- The dead letters of messages of one partition.
DELETE FROM queen.dead_letters WHERE partition_id = $1 AND message_offset = ANY($2::bigint[])
RETURNING id, message_offset;

-- name: dead_letter_offsets
-- The offsets of a partition at which transaction ids are dead letters.
SELECT DISTINCT transaction_id, message_offset FROM queen.dead_letters
WHERE partition_id = $1 AND transaction_id = ANY($2::text[]) ORDER BY message_offset;

-- name: dead_letter_producers
-- Who has pushed messages that are dead letters.
SELECT DISTINCT d.partition_id, d.message_offset, d.producer_sub
FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, message_offset)
JOIN queen.dead_letters d ON d.partition_id = i.partition_id AND d.message_offset = i.message_offset;

