-- Moving queues and topics between shards. `source` has it before the move, `target` after it.

-- name: move_lock
-- Take the lock of the one move that may leave this shard at a time; false when another session has it.
SELECT pg_try_advisory_lock($1);

-- name: move_unlock
-- Release it.
SELECT pg_advisory_unlock($1);

-- name: move_lock_timeout
-- How long statements of this transaction wait for a lock.
SELECT set_config('lock_timeout', $1, true);

-- name: move_begin
-- Record a move.
INSERT INTO queen.moves (id, kind, name, from_shard, to_shard) VALUES ($1, $2, $3, $4, $5);

-- name: move_placement
-- Record on which shard a name lives; `left_id` stays known once it is.
INSERT INTO queen.placements AS p (kind, name, shard, move_id, arriving, left_id) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (kind, name) DO UPDATE SET shard = excluded.shard, move_id = excluded.move_id,
    arriving = excluded.arriving, left_id = coalesce(excluded.left_id, p.left_id);

-- name: move_next_version
-- Have servers read the placements again.
UPDATE queen.shard SET version = version + 1;

-- name: moves_of
-- The moves of a name that have left rows on this shard.
SELECT id FROM queen.moves WHERE kind = $1 AND name = $2;

-- name: running_moves
-- Moves that have not switched over, oldest first.
SELECT kind, name, from_shard, to_shard, begun_at FROM queen.moves WHERE partitions IS NULL ORDER BY begun_at;

-- name: unfinished_moves
-- What is recorded as being moved, oldest first.
SELECT kind, name FROM queen.moves ORDER BY begun_at;

-- name: move_remove_rows
-- Remove the rows that an unfinished move has brought.
DELETE FROM queen.move_rows WHERE move_id = $1;

-- name: move_remove_unfinished
-- Remove the records of moves of a name that were not finished.
DELETE FROM queen.moves WHERE kind = $1 AND name = $2 AND partitions IS NULL;

-- name: move_remove
-- Remove the record of a move.
DELETE FROM queen.moves WHERE id = $1;

-- name: move_cancel_arrival
-- An unfinished move of a name is no longer expected here.
UPDATE queen.placements SET arriving = false, left_id = NULL, move_id = CASE WHEN arriving THEN NULL ELSE move_id END
WHERE kind = $1 AND name = $2;

-- name: move_left_partitions
-- The partitions whose segments a finished move has left behind; null when it was not finished.
SELECT partitions FROM queen.moves WHERE id = $1;

-- name: move_partitions_here
-- Which of some partitions are on this shard.
SELECT id FROM queen.partitions WHERE id = ANY ($1::bigint[]);

-- name: move_save_rows
-- Keep rows of a table, as a JSON array, until the move is complete.
INSERT INTO queen.move_rows (move_id, table_name, rows) VALUES ($1, $2, $3);

-- name: move_queue_lock_tables
-- Let no session change what belongs to queues; in the order in which all take these locks: cursors before partitions.
LOCK TABLE queen.cursors, queen.stream_state, queen.dead_letters, queen.traces, queen.subscriptions IN EXCLUSIVE MODE;

-- name: move_queue_lock
-- Lock a queue.
SELECT FROM queen.queues WHERE id = $1 FOR UPDATE;

-- name: move_queue_lock_partitions
-- Lock the partitions of a queue; where each ends.
SELECT id, next_offset FROM queen.partitions WHERE queue_id = $1 ORDER BY id FOR UPDATE;

-- name: move_queue_partitions
-- The partitions of a queue, and where each ends.
SELECT id, next_offset FROM queen.partitions WHERE queue_id = $1 ORDER BY id;

-- name: move_queue_messages
-- How many messages a queue holds.
SELECT coalesce(sum(next_offset - floor_offset), 0)::bigint FROM queen.partitions WHERE queue_id = $1;

-- name: move_read_queues
-- The row of a queue.
SELECT to_jsonb(t) FROM queen.queues t WHERE id = $1;

-- name: move_read_partitions
-- The partitions of a queue.
SELECT to_jsonb(t) FROM queen.partitions t WHERE queue_id = $1;

-- name: move_read_cursors
-- The cursors of groups in a queue.
SELECT to_jsonb(t) FROM queen.cursors t
WHERE partition_id IN (SELECT id FROM queen.partitions WHERE queue_id = $1);

-- name: move_read_subscriptions
-- The subscriptions of groups to a queue, by its name.
SELECT to_jsonb(t) FROM queen.subscriptions t WHERE queue_name = $1;

-- name: move_read_dead_letters
-- The dead letters of a queue.
SELECT to_jsonb(t) FROM queen.dead_letters t WHERE queue_id = $1;

-- name: move_read_traces
-- The traces of a queue.
SELECT to_jsonb(t) FROM queen.traces t WHERE queue_id = $1;

-- name: move_read_trace_names
-- The names of the traces of a queue.
SELECT to_jsonb(n) FROM queen.trace_names n JOIN queen.traces t ON t.id = n.trace_id WHERE t.queue_id = $1;

-- name: move_read_stream_state
-- The state that streaming queries keep by partitions of a queue.
SELECT to_jsonb(t) FROM queen.stream_state t
WHERE partition_id IN (SELECT id FROM queen.partitions WHERE queue_id = $1);

-- name: move_read_kv
-- The keys of the namespace of a queue, by its name.
SELECT to_jsonb(t) FROM queen.kv t WHERE namespace = $1;

-- name: move_read_timers
-- The timers of a queue, by its name.
SELECT to_jsonb(t) FROM queen.timers t WHERE queue = $1;

-- name: move_queue_groups
-- The groups of which rows of a queue (id $1, name $2) speak.
SELECT DISTINCT group_id FROM queen.cursors
WHERE partition_id IN (SELECT id FROM queen.partitions WHERE queue_id = $1)
UNION SELECT group_id FROM queen.dead_letters WHERE queue_id = $1
UNION SELECT group_id FROM queen.subscriptions WHERE queue_name = $2;

-- name: move_group_names
-- The names of groups.
SELECT id, name FROM queen.groups WHERE id = ANY ($1::integer[]) ORDER BY name;

-- name: move_create_groups
-- Create the groups that are missing.
INSERT INTO queen.groups (name) SELECT unnest($1::text[]) ON CONFLICT (name) DO NOTHING;

-- name: move_group_ids
-- The ids of groups by their names.
SELECT id, name FROM queen.groups WHERE name = ANY ($1::text[]);

-- name: move_stream_queries
-- The streaming queries that read a queue, by its name.
SELECT id, public_id, name, source_queue, sink_queue, config_hash, created_at FROM queen.stream_queries
WHERE source_queue = $1 ORDER BY name;

-- name: move_save_stream_query
-- Store a streaming query under the public id by which it is known; its id on this shard.
INSERT INTO queen.stream_queries (public_id, name, source_queue, sink_queue, config_hash, created_at)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (name) DO UPDATE SET public_id = excluded.public_id, source_queue = excluded.source_queue,
    sink_queue = excluded.sink_queue, config_hash = excluded.config_hash
RETURNING id;

-- name: move_remove_queue
-- Remove a queue (id $1, name $2) with all that belongs to it but its segments, and remember ($3: move, $4: partitions)
-- that these are left.
WITH cursors AS (
    DELETE FROM queen.cursors WHERE partition_id IN (SELECT id FROM queen.partitions WHERE queue_id = $1)
), state AS (
    DELETE FROM queen.stream_state WHERE partition_id IN (SELECT id FROM queen.partitions WHERE queue_id = $1)
), dead AS (
    DELETE FROM queen.dead_letters WHERE queue_id = $1
), traces AS (
    DELETE FROM queen.traces WHERE queue_id = $1
), timers AS (
    DELETE FROM queen.timers WHERE queue = $2
), keys AS (
    DELETE FROM queen.kv WHERE namespace = $2
), subscriptions AS (
    DELETE FROM queen.subscriptions WHERE queue_name = $2
), queries AS (
    DELETE FROM queen.stream_queries WHERE source_queue = $2
), queue AS (
    DELETE FROM queen.queues WHERE id = $1
)
UPDATE queen.moves SET partitions = $4 WHERE id = $3;

-- name: move_segments
-- Some segments of partitions from an offset on, partition by partition in order.
SELECT s.partition_id, s.base_offset, s.count, s.created_at, s.ids, s.body
FROM unnest($1::bigint[], $2::bigint[]) AS i (id, first)
CROSS JOIN LATERAL (
    SELECT * FROM queen.segments WHERE partition_id = i.id AND base_offset >= i.first ORDER BY base_offset LIMIT $3
) s
ORDER BY s.partition_id, s.base_offset LIMIT $3;

-- name: move_remove_segments
-- Remove some of the segments of partitions.
DELETE FROM queen.segments s
USING (SELECT partition_id, base_offset FROM queen.segments WHERE partition_id = ANY ($1::bigint[]) LIMIT 1000) d
WHERE s.partition_id = d.partition_id AND s.base_offset = d.base_offset;

-- name: move_keep_partitions
-- Partitions that were dropped here come back: their segments are no longer to be removed.
DELETE FROM queen.dropped_partitions WHERE partition_id = ANY ($1::bigint[]);

-- name: move_forget_rewritten
-- Forget which segments were rewritten before the copy began.
DELETE FROM queen.rewritten_segments WHERE partition_id = ANY ($1::bigint[]);

-- name: move_rewritten_segments
-- The segments that were rewritten since the copy began.
SELECT s.partition_id, s.base_offset, s.body FROM queen.rewritten_segments r
JOIN queen.segments s USING (partition_id, base_offset) WHERE r.partition_id = ANY ($1::bigint[]);

-- name: move_rewrite_segment
-- Replace the body of a copied segment.
UPDATE queen.segments SET body = $3 WHERE partition_id = $1 AND base_offset = $2;

-- name: move_first_offsets
-- The first offset that each partition still holds; the largest number for an empty one.
SELECT i.id, coalesce((SELECT min(base_offset) FROM queen.segments WHERE partition_id = i.id), 9223372036854775807)
    AS first
FROM unnest($1::bigint[]) AS i (id);

-- name: move_remove_segments_before
-- Remove copied segments that retention has removed at the source meanwhile.
DELETE FROM queen.segments s USING unnest($1::bigint[], $2::bigint[]) AS i (id, first)
WHERE s.partition_id = i.id AND s.base_offset < i.first;

-- name: move_topic_items
-- How many items a topic holds.
SELECT count(*) FROM queen.topic_items WHERE topic_id = $1;

-- name: move_topic_lock
-- Let no session enqueue to, or dequeue from, topics of this lock.
SELECT pg_advisory_xact_lock($1::integer, $2::integer);

-- name: move_topic_lock_row
-- Lock a topic.
SELECT FROM queen.topics WHERE id = $1 FOR UPDATE;

-- name: move_create_namespace
-- The id of a namespace, which is created if it is missing.
INSERT INTO queen.topic_namespaces (name) VALUES ($1) ON CONFLICT (name) DO UPDATE SET name = excluded.name
RETURNING id;

-- name: move_read_topics
-- The row of a topic.
SELECT to_jsonb(t) FROM queen.topics t WHERE id = $1;

-- name: move_read_topic_heads
-- The counts of a topic.
SELECT to_jsonb(t) FROM queen.topic_heads t WHERE topic_id = $1;

-- name: move_read_topic_dead_letters
-- The dead items of a topic, locked.
SELECT to_jsonb(t) FROM queen.topic_dead_letters t WHERE topic_id = $1 FOR UPDATE;

-- name: move_read_topic_keys
-- The idempotency keys of the items of a topic.
SELECT to_jsonb(k) FROM queen.topic_items i
JOIN queen.topics t ON t.id = i.topic_id
JOIN queen.topic_keys k ON k.namespace_id = t.namespace_id AND k.key = i.idempotency_key AND k.item_id = i.id
WHERE i.topic_id = $1;

-- name: move_remove_topic
-- Remove a topic whose items have been taken.
WITH heads AS (
    DELETE FROM queen.topic_heads WHERE topic_id = $1
), dead AS (
    DELETE FROM queen.topic_dead_letters WHERE topic_id = $1
), ready AS (
    DELETE FROM queen.topic_ready WHERE topic_id = $1
)
DELETE FROM queen.topics WHERE id = $1;

-- name: move_drop_copied_items
-- Drop the list of copied items of an earlier move in this session.
DROP TABLE IF EXISTS pg_temp.copied_items;

-- name: move_create_copied_items
-- The list of copied items, and of the version in which each was copied.
CREATE TEMP TABLE copied_items (id bigint PRIMARY KEY, version bigint NOT NULL);

-- name: move_save_copied_item
-- An item was copied in this version.
INSERT INTO pg_temp.copied_items VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET version = excluded.version;

-- name: move_changed_items
-- The items of a topic that are not copied yet, or not as they are now. A version of a row is the transaction that wrote
-- it. Leased items and those that expire soon wait until the topic is locked: expiry goes on at the source.
SELECT i.*, i.xmin::text::bigint AS version
FROM queen.topic_items i LEFT JOIN pg_temp.copied_items c ON c.id = i.id
WHERE i.topic_id = $1 AND i.leased_until IS NULL
    AND (i.expires_at IS NULL OR i.expires_at > clock_timestamp() + interval '1 hour')
    AND c.version IS DISTINCT FROM i.xmin::text::bigint;

-- name: move_take_items
-- Remove all items of a topic: their ids, with the item where the copy is missing or old. Waits for sessions that lease
-- or ack an item at this moment; the lock keeps others out.
WITH gone AS (
    DELETE FROM queen.topic_items i WHERE topic_id = $1 RETURNING i AS item, i.id, i.xmin::text::bigint AS version
)
SELECT g.id, CASE WHEN c.id IS NULL THEN to_jsonb(g.item) END AS item
FROM gone g LEFT JOIN pg_temp.copied_items c ON c.id = g.id AND c.version = g.version;

-- name: move_remove_items
-- Remove copies of items by their ids.
DELETE FROM queen.topic_items WHERE id = ANY ($1::bigint[]);

-- name: move_clear_items
-- Remove some of the copies that an earlier attempt has left.
DELETE FROM queen.topic_items WHERE id IN (SELECT id FROM queen.topic_items WHERE topic_id = $1 LIMIT 5000);
