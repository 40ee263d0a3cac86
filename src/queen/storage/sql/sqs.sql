-- Queues and messages as Amazon's SQS has them. Everything but the last two statements runs on the first shard.

-- name: sqs_queue
-- A queue by its name.
SELECT id, name, attributes::text AS attributes, tags::text AS tags, created_at, modified_at
FROM queen.sqs_queues WHERE name = $1;

-- name: sqs_create_queue
-- Create a queue; no row when its name is taken.
INSERT INTO queen.sqs_queues (name, attributes, tags) VALUES ($1, $2::text::jsonb, $3::text::jsonb)
ON CONFLICT (name) DO NOTHING
RETURNING id, name, attributes::text AS attributes, tags::text AS tags, created_at, modified_at;

-- name: sqs_set_attributes
-- Set attributes of a queue ($2), and remove some ($3).
UPDATE queen.sqs_queues SET attributes = (attributes || $2::text::jsonb) - $3::text[], modified_at = clock_timestamp()
WHERE name = $1 RETURNING id;

-- name: sqs_set_tags
-- Set tags of a queue ($2), and remove some ($3).
UPDATE queen.sqs_queues SET tags = (tags || $2::text::jsonb) - $3::text[] WHERE name = $1 RETURNING id;

-- name: sqs_begin_purge
-- Note that a queue is purged; no row when it was within the last minute.
UPDATE queen.sqs_queues SET purged_at = clock_timestamp()
WHERE name = $1 AND (purged_at IS NULL OR purged_at < clock_timestamp() - interval '60 seconds') RETURNING id;

-- name: sqs_delete_queue
-- Delete a queue, and what is known of its messages.
WITH gone AS (
    DELETE FROM queen.sqs_queues WHERE name = $1 RETURNING id
), deliveries AS (
    DELETE FROM queen.sqs_deliveries d USING gone g WHERE d.queue_id = g.id
), keys AS (
    DELETE FROM queen.sqs_deduplication k USING gone g WHERE k.queue_id = g.id
), attempts AS (
    DELETE FROM queen.sqs_attempts a USING gone g WHERE a.queue_id = g.id
)
SELECT id FROM gone;

-- name: sqs_queue_names
-- Names of queues with a prefix, after a name ($2), so many.
SELECT name FROM queen.sqs_queues WHERE starts_with(name, $1) AND name > $2 ORDER BY name LIMIT $3;

-- name: sqs_queues_with_target
-- Names of the queues whose dead letters go to a queue ($1: the end of its ARN), after a name, so many.
SELECT name FROM queen.sqs_queues
WHERE right((attributes ->> 'RedrivePolicy')::jsonb ->> 'deadLetterTargetArn', length($1) + 1) = ':' || $1 AND name > $2
ORDER BY name LIMIT $3;

-- name: sqs_deduplicate
-- The transaction ids under which messages are pushed: that of the first one with its key in the last five minutes.
INSERT INTO queen.sqs_deduplication AS k (queue_id, key, transaction_id, partition, created_at)
SELECT DISTINCT ON (i.queue_id, i.key) i.queue_id, i.key, i.transaction_id, i.partition, clock_timestamp()
FROM unnest($1::integer[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY
    AS i (queue_id, key, transaction_id, partition, place)
ORDER BY i.queue_id, i.key, i.place
ON CONFLICT (queue_id, key) DO UPDATE SET
    transaction_id = CASE WHEN k.created_at < excluded.created_at - interval '5 minutes' THEN excluded.transaction_id
        ELSE k.transaction_id END,
    partition = CASE WHEN k.created_at < excluded.created_at - interval '5 minutes' THEN excluded.partition
        ELSE k.partition END,
    created_at = CASE WHEN k.created_at < excluded.created_at - interval '5 minutes' THEN excluded.created_at
        ELSE k.created_at END
RETURNING queue_id, key, transaction_id, partition;

-- name: sqs_received
-- Note that messages were received, each for so many seconds; gives how often they were, and which are deleted.
INSERT INTO queen.sqs_deliveries AS d (message_id, queue_id, partition_id, lease_id, place, transaction_id, first_at,
    visible_at)
SELECT i.message_id, i.queue_id, i.partition_id, i.lease_id, i.place, i.transaction_id, clock_timestamp(),
    clock_timestamp() + make_interval(secs => i.seconds)
FROM unnest($1::integer[], $2::text[]::uuid[], $3::text[]::uuid[], $4::text[]::uuid[], $5::integer[], $6::text[],
    $7::float8[])
    AS i (queue_id, message_id, partition_id, lease_id, place, transaction_id, seconds)
ORDER BY i.message_id
ON CONFLICT (message_id) DO UPDATE SET receives = d.receives + 1, lease_id = excluded.lease_id, place = excluded.place,
    visible_at = excluded.visible_at
RETURNING message_id::text AS message_id, receives, deleted, first_at;

-- name: sqs_mark_deleted
-- Delete received messages, as long as they are not visible again; gives those that are.
UPDATE queen.sqs_deliveries d SET deleted = true
FROM unnest($1::text[]::uuid[], $2::text[]::uuid[]) AS i (message_id, lease_id)
WHERE d.message_id = i.message_id AND d.lease_id = i.lease_id AND (d.deleted OR d.visible_at > clock_timestamp())
RETURNING d.message_id::text AS message_id, d.lease_id::text AS lease_id;

-- name: sqs_known_deliveries
-- Those of some messages that were received and are not consumed.
SELECT message_id FROM queen.sqs_deliveries WHERE message_id = ANY ($1::uuid[]);

-- name: sqs_consumable
-- Of each lease ($1: partitions, $2: leases) the last message before which all are deleted, if it is deleted too.
SELECT l.partition_id::text AS partition_id, l.lease_id::text AS lease_id, c.place, c.transaction_id
FROM (SELECT DISTINCT partition_id, lease_id
    FROM unnest($1::text[]::uuid[], $2::text[]::uuid[]) AS i (partition_id, lease_id)) l
CROSS JOIN LATERAL (
    SELECT d.place, d.transaction_id FROM queen.sqs_deliveries d
    WHERE d.partition_id = l.partition_id AND d.lease_id = l.lease_id AND d.deleted AND d.place < coalesce((
        SELECT min(e.place) FROM queen.sqs_deliveries e
        WHERE e.partition_id = l.partition_id AND e.lease_id = l.lease_id AND NOT e.deleted), 2147483647)
    ORDER BY d.place DESC LIMIT 1
) c;

-- name: sqs_consumed
-- Forget messages that are consumed: those of leases up to a place.
DELETE FROM queen.sqs_deliveries d
USING unnest($1::text[]::uuid[], $2::text[]::uuid[], $3::integer[]) AS i (partition_id, lease_id, place)
WHERE d.partition_id = i.partition_id AND d.lease_id = i.lease_id AND d.place <= i.place;

-- name: sqs_change_visibility
-- Make messages visible in so many seconds from now; gives those that were received and are not visible yet.
UPDATE queen.sqs_deliveries d SET visible_at = clock_timestamp() + make_interval(secs => i.seconds)
FROM unnest($1::text[]::uuid[], $2::text[]::uuid[], $3::float8[]) AS i (message_id, lease_id, seconds)
WHERE d.message_id = i.message_id AND d.lease_id = i.lease_id AND NOT d.deleted AND d.visible_at > clock_timestamp()
RETURNING d.message_id::text AS message_id, d.lease_id::text AS lease_id;

-- name: sqs_lease_ends
-- In how many seconds the last message of each lease ($1: partitions, $2: leases) that is not deleted is visible.
SELECT l.partition_id::text AS partition_id, l.lease_id::text AS lease_id, (
    SELECT greatest(0, extract(epoch FROM max(d.visible_at) - clock_timestamp()))::float8 FROM queen.sqs_deliveries d
    WHERE d.partition_id = l.partition_id AND d.lease_id = l.lease_id AND NOT d.deleted
) AS seconds
FROM (SELECT DISTINCT partition_id, lease_id
    FROM unnest($1::text[]::uuid[], $2::text[]::uuid[]) AS i (partition_id, lease_id)) l;

-- name: sqs_in_flight
-- How many messages of a queue are received and not visible, and how many deleted ones are not consumed yet.
SELECT count(*) FILTER (WHERE NOT deleted AND visible_at > clock_timestamp()) AS hidden,
    count(*) FILTER (WHERE deleted) AS deleted
FROM queen.sqs_deliveries WHERE queue_id = $1;

-- name: sqs_forget_deliveries
-- Forget what was received of a queue; gives the leases.
WITH gone AS (
    DELETE FROM queen.sqs_deliveries WHERE queue_id = $1 RETURNING partition_id, lease_id
)
SELECT DISTINCT partition_id, lease_id FROM gone;

-- name: sqs_clean
-- Remove some of what has no effect any more.
WITH keys AS (
    DELETE FROM queen.sqs_deduplication WHERE (queue_id, key) IN (
        SELECT queue_id, key FROM queen.sqs_deduplication
        WHERE created_at < clock_timestamp() - interval '10 minutes' LIMIT 10000 FOR UPDATE SKIP LOCKED)
), attempts AS (
    DELETE FROM queen.sqs_attempts WHERE created_at < clock_timestamp() - interval '5 minutes'
), deliveries AS (
    -- No message is kept for longer.
    DELETE FROM queen.sqs_deliveries WHERE message_id IN (
        SELECT message_id FROM queen.sqs_deliveries
        WHERE first_at < clock_timestamp() - interval '15 days' LIMIT 1000 FOR UPDATE SKIP LOCKED)
)
DELETE FROM queen.sqs_move_tasks WHERE started_at < clock_timestamp() - interval '30 days';

-- name: sqs_attempt
-- What a receive with this attempt id has answered in the last five minutes.
SELECT received FROM queen.sqs_attempts
WHERE queue_id = $1 AND attempt = $2 AND created_at > clock_timestamp() - interval '5 minutes';

-- name: sqs_remember_attempt
-- Remember what a receive with an attempt id answers.
INSERT INTO queen.sqs_attempts (queue_id, attempt, received) VALUES ($1, $2, $3)
ON CONFLICT (queue_id, attempt) DO UPDATE SET received = excluded.received, created_at = excluded.created_at;

-- name: sqs_start_move
-- Begin a task that moves messages; no row when one is running for this source.
INSERT INTO queen.sqs_move_tasks (id, source, destination, per_second, total)
SELECT $1, $2, $3, $4, $5 WHERE NOT EXISTS (
    SELECT FROM queen.sqs_move_tasks WHERE source = $2 AND status IN ('RUNNING', 'CANCELLING')
        AND alive_at > clock_timestamp() - interval '30 seconds')
RETURNING id;

-- name: sqs_move_progress
-- Add to what a task has moved; gives its status.
UPDATE queen.sqs_move_tasks SET moved = moved + $2, alive_at = clock_timestamp() WHERE id = $1 RETURNING status;

-- name: sqs_end_move
-- End a task; one that is to be cancelled is cancelled.
UPDATE queen.sqs_move_tasks SET failure = $3, alive_at = clock_timestamp(),
    status = CASE WHEN status = 'CANCELLING' THEN 'CANCELLED' ELSE $2 END
WHERE id = $1;

-- name: sqs_move_source
-- The queue whose messages a task moves.
SELECT source FROM queen.sqs_move_tasks WHERE id = $1;

-- name: sqs_cancel_move
-- Have a task end; no row when none is running.
UPDATE queen.sqs_move_tasks SET status = 'CANCELLING' WHERE id = $1 AND status = 'RUNNING'
    AND alive_at > clock_timestamp() - interval '30 seconds'
RETURNING moved, source;

-- name: sqs_moves
-- The last tasks of a source. One whose server is gone has failed.
SELECT id, source, destination, per_second, moved, total, failure, started_at,
    CASE WHEN status IN ('RUNNING', 'CANCELLING') AND alive_at < clock_timestamp() - interval '30 seconds'
        THEN 'FAILED' ELSE status END AS status
FROM queen.sqs_move_tasks WHERE source = $1 ORDER BY started_at DESC LIMIT $2;

-- name: sqs_leased
-- How many items of a topic (namespace, name) are in flight. On the shard of the topic.
SELECT (
    SELECT count(*) FROM queen.topic_items i
    WHERE i.topic_id = t.id AND i.leased_until > statement_timestamp() AND i.lease_owner IS NOT NULL
) + (
    SELECT count(*) FROM queen.topic_handouts h CROSS JOIN LATERAL unnest(h.ids) AS u (id)
    JOIN queen.topic_items i ON i.id = u.id AND i.leased_until IS NOT DISTINCT FROM 'infinity' AND i.lease_owner IS NULL
    WHERE h.topic_id = t.id
) AS hidden
FROM queen.topic_namespaces n JOIN queen.topics t ON t.namespace_id = n.id WHERE n.name = $1 AND t.name = $2;

-- name: sqs_set_leases
-- Make live leases of partitions end in so many seconds. On the shard of the partitions.
UPDATE queen.cursors c SET lease_until = clock_timestamp() + make_interval(secs => i.seconds)
FROM unnest($1::bigint[], $2::uuid[], $3::float8[]) AS i (partition_id, lease_id, seconds)
JOIN queen.partitions p ON p.id = i.partition_id
WHERE c.partition_id = i.partition_id AND c.lease_id = i.lease_id AND c.lease_until > clock_timestamp()
RETURNING p.queue_id, c.partition_id, c.group_id, p.next_offset - greatest(c.committed, p.floor_offset) AS available;
