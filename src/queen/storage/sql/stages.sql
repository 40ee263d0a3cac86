-- Staged publishing: tasks stage segments, and a batch of them is published in one transaction, once.

-- name: stage
-- Stage segments; what is staged under the same number already stays as it is.
INSERT INTO queen.stages (run, batch, attempt, seq, partition_id, queue, partition, count, named, hashes, body)
SELECT $1, $2, $3, s.* FROM unnest($4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::integer[], $9::boolean[],
    $10::bytea[], $11::bytea[]) AS s
ON CONFLICT DO NOTHING;

-- name: stage_published
-- The batch up to which a run is published.
SELECT batch, messages, duplicates FROM queen.stage_runs WHERE run = $1;

-- name: stage_claim
-- A batch is being published by this transaction. No row: it was published before.
INSERT INTO queen.stage_runs AS r (run, batch) VALUES ($1, $2)
ON CONFLICT (run) DO UPDATE SET batch = excluded.batch, published_at = excluded.published_at
    WHERE r.batch < excluded.batch
RETURNING batch;

-- name: stage_note
-- What the batch that is being published came to.
UPDATE queen.stage_runs SET messages = $2, duplicates = $3 WHERE run = $1;

-- name: stage_targets
-- The partitions for which some attempts staged.
SELECT DISTINCT queue, partition, partition_id FROM queen.stages
WHERE run = $1 AND batch = $2 AND attempt = ANY($3::uuid[]);

-- name: stage_list
-- What some attempts staged, in the order in which it is published; with the first byte of each body, which says whether it is encrypted.
SELECT s.attempt, s.seq, s.partition_id, s.queue, s.partition, s.count, s.named, octet_length(s.body) AS nbytes,
    get_byte(substring(s.body FROM 1 FOR 1), 0) AS kind
FROM unnest($3::uuid[]) WITH ORDINALITY AS a (attempt, place)
JOIN queen.stages s ON s.run = $1 AND s.batch = $2 AND s.attempt = a.attempt
ORDER BY a.place, s.seq;

-- name: stage_bodies
-- What was staged under some numbers.
SELECT s.hashes, s.body FROM unnest($3::uuid[], $4::bigint[]) WITH ORDINALITY AS i (attempt, seq, place)
JOIN queen.stages s ON s.run = $1 AND s.batch = $2 AND s.attempt = i.attempt AND s.seq = i.seq
ORDER BY i.place;

-- name: stage_advance
-- Give out offsets of partitions that are locked already.
UPDATE queen.partitions p SET next_offset = p.next_offset + i.n, last_at = greatest(p.last_at, clock_timestamp())
FROM unnest($1::bigint[], $2::bigint[]) AS i (id, n) WHERE p.id = i.id
RETURNING p.id, p.last_at;

-- name: stage_move
-- Make staged segments part of their partitions: $5 partition, $6 base offset, $7 time, $8 first message id of each.
INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)
SELECT i.partition_id, i.base_offset, s.count, i.at, i.first || s.hashes, s.body
FROM unnest($3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[], $8::bytea[])
    AS i (attempt, seq, partition_id, base_offset, at, first)
JOIN queen.stages s ON s.run = $1 AND s.batch = $2 AND s.attempt = i.attempt AND s.seq = i.seq
RETURNING 1;

-- name: stage_copy
-- Copy staged segments to where no reader finds them: $5 and $6 their keys for now, $7 first message id of each.
INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)
SELECT i.partition_id, i.base_offset, s.count, '-infinity', i.first || s.hashes, s.body
FROM unnest($3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bytea[])
    AS i (attempt, seq, partition_id, base_offset, first)
JOIN queen.stages s ON s.run = $1 AND s.batch = $2 AND s.attempt = i.attempt AND s.seq = i.seq
RETURNING 1;

-- name: stage_place
-- Make copied segments part of their partitions: $1 and $2 their keys so far, $3 partition, $4 base offset, $5 time.
-- What is stored beside the row, as bodies of some size are, stays where it is.
UPDATE queen.segments s SET partition_id = i.partition_id, base_offset = i.base_offset, created_at = i.at
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::timestamptz[])
    AS i (old_partition, old_base, partition_id, base_offset, at)
WHERE s.partition_id = i.old_partition AND s.base_offset = i.old_base
RETURNING 1;

-- name: stage_flush
-- Have PostgreSQL write out what all transactions have logged so far, so that the next commit has little left to write.
SELECT pg_logical_emit_message(true, 'queen', '');

-- name: stage_hashes
-- The hashes of the transaction ids that were staged under some numbers.
SELECT s.hashes FROM unnest($3::uuid[], $4::bigint[]) WITH ORDINALITY AS i (attempt, seq, place)
JOIN queen.stages s ON s.run = $1 AND s.batch = $2 AND s.attempt = i.attempt AND s.seq = i.seq
ORDER BY i.place;

-- name: stage_ends
-- Where partitions end.
SELECT id, next_offset FROM queen.partitions WHERE id = ANY($1::bigint[]);

-- name: stage_notify_partitions
-- Notify servers, by the change log, of partitions that got messages ('p').
INSERT INTO queen.changes (kind, queue_id, partition_id, name)
SELECT 'p', i.queue_id, i.partition_id, '' FROM unnest($1::integer[], $2::bigint[]) AS i (queue_id, partition_id);

-- name: stage_notify_topics
-- Notify servers of topics that got items ('e'): namespace and topic, with a line break between them.
INSERT INTO queen.changes (kind, queue_id, partition_id, name) SELECT 'e', 0, 0, unnest($1::text[]);

-- name: push_maintenance_is_on
-- Whether pushes go to the spool.
SELECT EXISTS (
    SELECT FROM queen.system_state WHERE key = 'maintenance_mode' AND (value ->> 'enabled')::boolean
) AS enabled;

-- name: stage_remove
-- Remove what a run staged for batches up to one.
DELETE FROM queen.stages WHERE run = $1 AND batch <= $2;

-- name: stage_abandon
-- Remove what a run staged for one batch.
DELETE FROM queen.stages WHERE run = $1 AND batch = $2 RETURNING count;

-- name: remove_old_stages
-- Staged rows that no run will publish any more, some at a time.
DELETE FROM queen.stages WHERE (run, batch, attempt, seq) IN (
    SELECT run, batch, attempt, seq FROM queen.stages
    WHERE staged_at < clock_timestamp() - make_interval(secs => $1::float8) LIMIT $2
) RETURNING 1;

-- name: remove_old_stage_runs
-- Runs that have published nothing for long, and single writes after a week, some at a time.
DELETE FROM queen.stage_runs WHERE run IN (
    SELECT run FROM queen.stage_runs
    WHERE published_at < clock_timestamp() - CASE WHEN starts_with(run, 'write-') THEN interval '7 days'
        ELSE make_interval(secs => $1::float8) END
    LIMIT $2
) RETURNING 1;
