-- Taking over the data of a Queen 0.15. Statements `legacy_…` read its database, `import_…` write ours.

-- name: legacy_tables
-- Which of the tables of a Queen 0.15 there are in this database.
SELECT c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'queen' AND c.relkind IN ('r', 'p');

-- name: legacy_message_columns
-- The columns of messages, of which older versions lack some.
SELECT column_name FROM information_schema.columns WHERE table_schema = 'queen' AND table_name = 'messages';

-- name: legacy_horizon
-- Everything that was stored before this moment is visible: a message has the time at which its transaction began.
SELECT least(
    clock_timestamp(),
    coalesce(
        (
            SELECT min(xact_start) FROM pg_stat_activity
            WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()
        ),
        clock_timestamp()
    )
) AS at;

-- name: legacy_queues
-- Every queue with its options.
SELECT * FROM queen.queues ORDER BY created_at, name;

-- name: legacy_partitions
-- The partitions of all queues, with how many messages each has.
SELECT p.id, p.name, p.created_at, q.name AS queue,
    (SELECT count(*) FROM queen.messages m WHERE m.partition_id = p.id) AS messages
FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id ORDER BY q.name, p.name;

-- name: legacy_messages
-- The next messages of a partition ($1) in order, behind a position ($2, $3) and before the horizon ($4).
SELECT id, transaction_id, trace_id::text AS trace_id, payload::text AS payload, created_at, is_encrypted, producer_sub
FROM queen.messages
WHERE partition_id = $1 AND (created_at, id) > ($2, $3) AND created_at < $4
ORDER BY created_at, id LIMIT $5;

-- name: legacy_positions
-- Where the groups are on each partition.
SELECT c.partition_id, c.consumer_group, c.last_consumed_created_at, c.last_consumed_id, c.last_consumed_at,
    c.total_messages_consumed, c.total_batches_consumed, c.batch_retry_count, c.created_at
FROM queen.partition_consumers c;

-- name: legacy_subscriptions
-- Where groups begin on partitions that they have not touched.
SELECT consumer_group, queue_name, partition_name, subscription_mode, subscription_timestamp, created_at
FROM queen.consumer_groups_metadata WHERE queue_name <> '';

-- name: legacy_dead_letters
-- The dead letters of a partition, with their messages.
SELECT d.consumer_group, d.error_message, d.retry_count, d.original_created_at, d.failed_at,
    m.id, m.transaction_id, m.trace_id::text AS trace_id, m.payload::text AS payload, m.created_at, m.is_encrypted,
    m.producer_sub
FROM queen.dead_letter_queue d JOIN queen.messages m ON m.id = d.message_id
WHERE d.partition_id = $1 ORDER BY d.failed_at, d.id;

-- name: legacy_traces
-- The traces of a partition, with their names.
SELECT t.id, t.transaction_id, t.consumer_group, t.event_type, t.data::text AS data, t.created_at, t.worker_id,
    m.id AS message_id, m.created_at AS message_created_at,
    ARRAY(SELECT trace_name FROM queen.message_trace_names n WHERE n.trace_id = t.id ORDER BY 1) AS names
FROM queen.message_traces t JOIN queen.messages m ON m.id = t.message_id
WHERE t.partition_id = $1 ORDER BY t.created_at, t.id;

-- name: import_prepare
-- Where an import notes how far it is; in a schema of its own, to be dropped when all is taken over.
CREATE SCHEMA IF NOT EXISTS queen_import;
CREATE TABLE IF NOT EXISTS queen_import.partitions (
    source_id uuid PRIMARY KEY,
    partition_id bigint NOT NULL,
    queue_id integer NOT NULL,
    last_created_at timestamptz NOT NULL DEFAULT '-infinity',
    last_id uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    messages bigint NOT NULL DEFAULT 0
);

-- name: import_queue
-- Make a queue with these options, if there is none of that name; a queue that is there keeps its own.
INSERT INTO queen.queues (
    name, namespace, task, priority, lease_time, retry_limit, retry_delay, max_size, ttl, dead_letter_queue,
    dlq_after_max_retries, delayed_processing, window_buffer, retention_seconds, completed_retention_seconds,
    retention_enabled, encryption_enabled, max_wait_time_seconds, created_at
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
ON CONFLICT (name) DO NOTHING;

-- name: import_encrypted
-- Which of some queues are to be encrypted.
SELECT name, encryption_enabled FROM queen.queues WHERE name = ANY($1::text[]);

-- name: import_partition
-- Make a partition of a queue ($2), if need be, and note that it takes over another ($1); gives how far it is.
WITH queue AS (
    SELECT id FROM queen.queues WHERE name = $2
), made AS (
    INSERT INTO queen.partitions (queue_id, name, created_at) SELECT id, $3, $4 FROM queue
    ON CONFLICT (queue_id, name) DO UPDATE SET name = excluded.name RETURNING id, queue_id
)
INSERT INTO queen_import.partitions (source_id, partition_id, queue_id) SELECT $1, id, queue_id FROM made
ON CONFLICT (source_id) DO UPDATE SET source_id = excluded.source_id
RETURNING partition_id, queue_id, last_created_at, last_id, messages;

-- name: import_end
-- Lock a partition, and say where it ends and when its last message was stored.
SELECT next_offset, last_at FROM queen.partitions WHERE id = $1 FOR UPDATE;

-- name: import_segments
-- Append segments ($2 to $6) to a partition ($1).
INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)
SELECT $1, * FROM unnest($2::bigint[], $3::integer[], $4::timestamptz[], $5::bytea[], $6::bytea[]);

-- name: import_advance
-- A partition ends elsewhere now.
UPDATE queen.partitions SET next_offset = $2, last_at = greatest(last_at, $3) WHERE id = $1;

-- name: import_note
-- The import of a partition is at a message; belongs to the transaction that stored it.
UPDATE queen_import.partitions SET last_created_at = $2, last_id = $3, messages = messages + $4 WHERE source_id = $1;

-- name: import_progress
-- How far the import of every partition is.
SELECT source_id, partition_id, queue_id, last_created_at, last_id, messages FROM queen_import.partitions;

-- name: import_group
-- The id of a group, made if need be.
INSERT INTO queen.groups (name) VALUES ($1) ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING id;

-- name: import_segment_until
-- The last segment of a partition that begins at a position of the old order, a time ($2) and the bytes of an id ($3), or
-- before.
SELECT base_offset, count, created_at, ids FROM queen.segments
WHERE partition_id = $1 AND (created_at, substring(ids FOR 16)) <= ($2, $3::bytea)
ORDER BY base_offset DESC LIMIT 1;

-- name: import_cursor
-- Where a group is on a partition; a group that has come further here stays there.
INSERT INTO queen.cursors (
    partition_id, group_id, committed, attempts, total_consumed, total_batches, last_consumed_at, created_at
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (partition_id, group_id) DO UPDATE SET committed = excluded.committed,
    attempts = excluded.attempts, total_consumed = excluded.total_consumed,
    total_batches = excluded.total_batches, last_consumed_at = excluded.last_consumed_at
WHERE queen.cursors.committed < excluded.committed;

-- name: import_subscription
-- Where a group begins on partitions that it has not touched.
INSERT INTO queen.subscriptions (group_id, queue_name, partition_name, mode, since, created_at)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (group_id, queue_name, partition_name) DO NOTHING;

-- name: import_places
-- The offsets of messages of a partition by their times ($2).
SELECT base_offset, count, ids FROM queen.segments WHERE partition_id = $1 AND created_at = ANY($2::timestamptz[]);

-- name: import_dead_letter
-- A dead letter, unless it is there.
INSERT INTO queen.dead_letters (
    queue_id, partition_id, message_offset, group_id, message_id, transaction_id, trace_id, producer_sub, body,
    error_message, retry_count, original_created_at, failed_at
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
ON CONFLICT (partition_id, message_offset, group_id) DO NOTHING RETURNING id;

-- name: import_trace
-- A trace with its names, unless it is there.
WITH made AS (
    INSERT INTO queen.traces (
        public_id, queue_id, partition_id, message_offset, transaction_id, group_name, event_type, data, worker_id, created_at
    )
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10
    WHERE NOT EXISTS (
        SELECT FROM queen.traces WHERE partition_id = $3 AND message_offset = $4 AND public_id = $1
    )
    RETURNING id, created_at
)
INSERT INTO queen.trace_names (name, trace_id, created_at)
SELECT name, id, created_at FROM made, unnest($11::text[]) AS name RETURNING trace_id;

-- name: import_stored
-- The segments of a partition in order, from an offset on.
SELECT base_offset, count, created_at, ids, body FROM queen.segments
WHERE partition_id = $1 AND base_offset >= $2 ORDER BY base_offset LIMIT $3;
