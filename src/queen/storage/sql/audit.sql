-- What administrators did.

-- name: audit_write
-- Record a change, with its actor and address.
INSERT INTO queen.audit (actor, address, action, object, status, before, after)
VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7::text::jsonb);

-- name: audit_page
-- The newest first; $1 and $2 are an actor and an action to look for (empty: any), $3 the id below which the page begins.
SELECT id, at, actor, address, action, object, status, before::text AS before, after::text AS after
FROM queen.audit
WHERE ($1::text = '' OR actor = $1) AND ($2::text = '' OR action LIKE $2 || '%') AND ($3::bigint = 0 OR id < $3)
ORDER BY id DESC LIMIT $4;

-- name: remove_old_audit
-- Entries of an age in seconds, some at a time.
DELETE FROM queen.audit WHERE id IN (
    SELECT id FROM queen.audit WHERE at < clock_timestamp() - make_interval(secs => $1::float8) ORDER BY at LIMIT $2
) RETURNING 1;

-- name: audit_positions
-- Where a group is on its partitions, of one queue or of all.
SELECT q.name AS queue, p.name AS partition, c.committed AS "offset"
FROM queen.groups g
JOIN queen.cursors c ON c.group_id = g.id
JOIN queen.partitions p ON p.id = c.partition_id
JOIN queen.queues q ON q.id = p.queue_id
WHERE g.name = $1 AND ($2::text IS NULL OR q.name = $2)
ORDER BY c.partition_id LIMIT $3;

-- name: audit_subscriptions
-- Since when a group is subscribed to its queues, and to partitions of their own.
SELECT s.queue_name AS queue, s.partition_name AS partition, s.mode, s.since
FROM queen.subscriptions s JOIN queen.groups g ON g.id = s.group_id
WHERE g.name = $1
ORDER BY s.queue_name, s.partition_name LIMIT $2;

-- name: audit_pipeline
-- What was declared of a pipeline.
SELECT jsonb_build_object('declaration', declaration::jsonb)::text AS found FROM queen.pipelines WHERE name = $1;

-- name: audit_ephemeral
-- What an ephemeral queue was declared with, and how many messages it has.
SELECT jsonb_build_object('options', q.options, 'length', coalesce(r.length, 0))::text AS found
FROM queen.ephemeral_queues q FULL JOIN queen.ephemeral_rings r ON r.queue = q.name
WHERE coalesce(q.name, r.queue) = $1;

-- name: audit_stream
-- What a streaming query reads and writes.
SELECT jsonb_build_object('name', name, 'source_queue', source_queue, 'sink_queue', sink_queue)::text AS found
FROM queen.stream_queries WHERE name = $1;

-- name: audit_sqs_queue
-- The attributes and tags of a queue of SQS.
SELECT jsonb_build_object('attributes', attributes, 'tags', tags)::text AS found
FROM queen.sqs_queues WHERE name = $1;
