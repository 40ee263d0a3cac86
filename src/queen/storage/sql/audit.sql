-- What administrators did.

-- name: audit_write
-- Note what was done, by whom and from where.
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
