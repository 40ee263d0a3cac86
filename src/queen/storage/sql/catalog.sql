-- Queues, partitions, groups: who exists, made on first use.

-- name: queue_by_name
-- One queue with all its options.
SELECT * FROM queen.queues WHERE name = $1;

-- name: queues_by_names
-- Several queues with all their options.
SELECT * FROM queen.queues WHERE name = ANY($1::text[]);

-- name: all_queues
-- Every queue with all its options.
SELECT * FROM queen.queues ORDER BY id;

-- name: create_queues
-- Make the queues that do not exist yet, with default options; names in order, so two servers cannot deadlock.
INSERT INTO queen.queues (name, namespace, task)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS i (name, namespace, task) ORDER BY i.name
ON CONFLICT (name) DO NOTHING;

-- name: configure_queue
-- Create a queue or replace all its options.
INSERT INTO queen.queues (
    name, namespace, task, priority, lease_time, retry_limit, retry_delay, max_size, ttl, dead_letter_queue,
    dlq_after_max_retries, delayed_processing, window_buffer, retention_seconds, completed_retention_seconds,
    retention_enabled, encryption_enabled, max_wait_time_seconds, dedup_window_seconds
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
ON CONFLICT (name) DO UPDATE SET
    namespace = excluded.namespace,
    task = excluded.task,
    priority = excluded.priority,
    lease_time = excluded.lease_time,
    retry_limit = excluded.retry_limit,
    retry_delay = excluded.retry_delay,
    max_size = excluded.max_size,
    ttl = excluded.ttl,
    dead_letter_queue = excluded.dead_letter_queue,
    dlq_after_max_retries = excluded.dlq_after_max_retries,
    delayed_processing = excluded.delayed_processing,
    window_buffer = excluded.window_buffer,
    retention_seconds = excluded.retention_seconds,
    completed_retention_seconds = excluded.completed_retention_seconds,
    retention_enabled = excluded.retention_enabled,
    encryption_enabled = excluded.encryption_enabled,
    max_wait_time_seconds = excluded.max_wait_time_seconds,
    dedup_window_seconds = excluded.dedup_window_seconds
RETURNING *;

-- name: create_partitions
-- Make the partitions that do not exist yet; in order, so two servers cannot deadlock.
INSERT INTO queen.partitions (queue_id, name)
SELECT i.queue_id, i.name FROM unnest($1::integer[], $2::text[]) AS i (queue_id, name)
ORDER BY i.queue_id, i.name
ON CONFLICT (queue_id, name) DO NOTHING;

-- name: partitions_by_names
-- Partitions by (queue, name), with the offset their next message gets.
SELECT p.id, p.queue_id, p.name, p.next_offset
FROM unnest($1::integer[], $2::text[]) AS i (queue_id, name)
JOIN queen.partitions p ON p.queue_id = i.queue_id AND p.name = i.name;

-- name: partitions_by_ids
-- Partitions by id, with the queue they belong to.
SELECT p.id, p.queue_id, p.name, p.next_offset, q.name AS queue_name
FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id
WHERE p.id = ANY($1::bigint[]);

-- name: create_group
-- Make a consumer group if it does not exist yet.
INSERT INTO queen.groups (name) VALUES ($1) ON CONFLICT (name) DO NOTHING;

-- name: groups_by_names
-- Ids of consumer groups.
SELECT id, name FROM queen.groups WHERE name = ANY($1::text[]);

-- name: drop_queue_partitions
-- Remember the partitions of a queue that is about to go, so that their segments are removed afterwards.
INSERT INTO queen.dropped_partitions (partition_id)
SELECT id FROM queen.partitions WHERE queue_id = $1 ON CONFLICT DO NOTHING;

-- name: drop_queue_cursors
-- The cursors of a queue that is about to go.
DELETE FROM queen.cursors c USING queen.partitions p WHERE p.queue_id = $1 AND c.partition_id = p.id;

-- name: drop_queue_dead_letters
-- The dead letters of a queue that is about to go.
DELETE FROM queen.dead_letters WHERE queue_id = $1;

-- name: drop_queue_traces
-- The traces of a queue that is about to go.
DELETE FROM queen.traces t USING queen.partitions p WHERE p.queue_id = $1 AND t.partition_id = p.id;

-- name: drop_queue
-- A queue and its partitions.
DELETE FROM queen.queues WHERE id = $1 RETURNING id;

-- name: ping
-- Is anybody there?
SELECT 1;
