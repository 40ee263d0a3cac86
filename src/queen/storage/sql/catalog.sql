-- Queues, partitions, groups: looked up, and created on first use.

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

-- name: create_partitions
-- Make the partitions that do not exist yet; in order, so two servers cannot deadlock.
INSERT INTO queen.partitions (queue_id, name)
SELECT i.queue_id, i.name FROM unnest($1::integer[], $2::text[]) AS i (queue_id, name)
ORDER BY i.queue_id, i.name
ON CONFLICT (queue_id, name) DO NOTHING RETURNING queue_id;

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
-- The id of a consumer group, which is made if it does not exist: in one statement, since another session may delete it.
INSERT INTO queen.groups (name) VALUES ($1) ON CONFLICT (name) DO UPDATE SET name = EXCLUDED.name RETURNING id;

-- name: groups_by_names
-- Ids of consumer groups.
SELECT id, name FROM queen.groups WHERE name = ANY($1::text[]);

-- name: ping
-- Is PostgreSQL available?
SELECT 1;
