-- Queues, their ordered partitions, the segments that hold the messages, and the cursors of consumer groups.

CREATE TABLE queen.queues (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    public_id uuid NOT NULL DEFAULT gen_random_uuid(),
    name text NOT NULL UNIQUE,
    namespace text NOT NULL DEFAULT '',
    task text NOT NULL DEFAULT '',
    priority integer NOT NULL DEFAULT 0,
    lease_time integer NOT NULL DEFAULT 300,
    retry_limit integer NOT NULL DEFAULT 3,
    retry_delay integer NOT NULL DEFAULT 1000,
    max_size bigint NOT NULL DEFAULT 0,
    ttl integer,
    dead_letter_queue boolean NOT NULL DEFAULT false,
    dlq_after_max_retries boolean NOT NULL DEFAULT false,
    delayed_processing integer NOT NULL DEFAULT 0,
    window_buffer integer NOT NULL DEFAULT 0,
    retention_seconds integer NOT NULL DEFAULT 0,
    completed_retention_seconds integer NOT NULL DEFAULT 0,
    retention_enabled boolean NOT NULL DEFAULT false,
    encryption_enabled boolean NOT NULL DEFAULT false,
    max_wait_time_seconds integer NOT NULL DEFAULT 0,
    dedup_window_seconds integer,
    created_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN queen.queues.ttl IS 'Seconds after which an undelivered message expires; null: never.';
COMMENT ON COLUMN queen.queues.dedup_window_seconds IS 'Null: the server''s DEDUP_WINDOW_SECONDS.';

-- One row per partition; its lock orders pushes. Nothing that changes per push is indexed, so updates stay HOT.
CREATE TABLE queen.partitions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL REFERENCES queen.queues ON DELETE CASCADE,
    name text NOT NULL,
    next_offset bigint NOT NULL DEFAULT 0,
    floor_offset bigint NOT NULL DEFAULT 0,
    last_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (queue_id, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
CREATE INDEX partitions_by_queue ON queen.partitions (queue_id, id);
COMMENT ON COLUMN queen.partitions.next_offset IS 'The offset the next message gets.';
COMMENT ON COLUMN queen.partitions.floor_offset IS 'Nothing below it is delivered any more (retention, eviction, clear).';
COMMENT ON COLUMN queen.partitions.last_at IS 'When the newest message was stored; never goes backwards.';

-- One row per batch of messages. `ids`: 16 bytes first message id, then 8 bytes of hash per transaction id.
CREATE TABLE queen.segments (
    partition_id bigint NOT NULL,
    base_offset bigint NOT NULL,
    count integer NOT NULL,
    created_at timestamptz NOT NULL,
    ids bytea NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset)
) WITH (toast_tuple_target = 8160, vacuum_truncate = off, toast.vacuum_truncate = off,
        autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000);
ALTER TABLE queen.segments ALTER COLUMN ids SET STORAGE EXTERNAL, ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE queen.groups (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE
);

-- The position and the lease of one group on one partition.
CREATE TABLE queen.cursors (
    partition_id bigint NOT NULL,
    group_id integer NOT NULL,
    committed bigint NOT NULL,
    lease_id uuid,
    lease_start bigint NOT NULL DEFAULT 0,
    lease_end bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    finished_lease_id uuid,
    attempts integer NOT NULL DEFAULT 0,
    total_consumed bigint NOT NULL DEFAULT 0,
    total_batches bigint NOT NULL DEFAULT 0,
    lease_acquired_at timestamptz,
    last_consumed_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (partition_id, group_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
CREATE INDEX cursors_by_group ON queen.cursors (group_id, partition_id);
COMMENT ON COLUMN queen.cursors.committed IS 'The first offset not yet consumed.';
COMMENT ON COLUMN queen.cursors.lease_until IS 'Nothing is delivered before it: a lease (lease_id set) or a retry delay.';
COMMENT ON COLUMN queen.cursors.finished_lease_id IS 'The last lease that was acked to its end: repeated acks of it succeed.';

-- Where a group starts on partitions it has not touched yet. Kept when the queue goes, as its name may come back.
CREATE TABLE queen.subscriptions (
    group_id integer NOT NULL REFERENCES queen.groups ON DELETE CASCADE,
    queue_name text NOT NULL,
    partition_name text NOT NULL DEFAULT '',
    mode text NOT NULL,
    since timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (group_id, queue_name, partition_name)
);

-- Messages that were given up on. Each is a copy, so retention of the queue does not touch it.
CREATE TABLE queen.dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL,
    partition_id bigint NOT NULL,
    message_offset bigint NOT NULL,
    group_id integer NOT NULL,
    message_id uuid NOT NULL,
    transaction_id text NOT NULL,
    trace_id text,
    producer_sub text,
    body bytea NOT NULL,
    error_message text NOT NULL,
    retry_count integer NOT NULL,
    original_created_at timestamptz NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (partition_id, message_offset, group_id)
);
CREATE INDEX dead_letters_by_queue ON queen.dead_letters (queue_id, failed_at, id);
CREATE INDEX dead_letters_by_time ON queen.dead_letters (failed_at, id);
COMMENT ON COLUMN queen.dead_letters.body IS 'The payload, sealed like a segment body.';

CREATE TABLE queen.traces (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    public_id uuid NOT NULL DEFAULT gen_random_uuid(),
    queue_id integer NOT NULL,
    partition_id bigint NOT NULL,
    message_offset bigint NOT NULL,
    transaction_id text NOT NULL,
    group_name text NOT NULL,
    event_type text NOT NULL,
    data bytea NOT NULL,
    worker_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX traces_by_message ON queen.traces (partition_id, message_offset, id);
COMMENT ON COLUMN queen.traces.data IS 'JSON, sealed like a segment body.';

CREATE TABLE queen.trace_names (
    name text NOT NULL,
    trace_id bigint NOT NULL REFERENCES queen.traces ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, trace_id)
);
CREATE INDEX trace_names_by_trace ON queen.trace_names (trace_id);

-- What retention, eviction and expiry removed, per run and queue.
CREATE TABLE queen.retention_history (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_name text NOT NULL,
    kind text NOT NULL,
    messages bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX retention_history_by_time ON queen.retention_history (at);

-- Partitions whose queue is gone; their segments are removed in small steps afterwards.
CREATE TABLE queen.dropped_partitions (
    partition_id bigint PRIMARY KEY,
    dropped_at timestamptz NOT NULL DEFAULT now()
);
