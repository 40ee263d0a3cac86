-- What Amazon's SQS knows of queues and messages, and topics and queues do not. With several shards, the first has it.

CREATE TABLE IF NOT EXISTS queen.sqs_queues (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    attributes jsonb NOT NULL,
    tags jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    modified_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    purged_at timestamptz
);
COMMENT ON COLUMN queen.sqs_queues.attributes IS 'Those that were set; the others have their defaults.';

-- Deduplication ids of FIFO queues are unique in the queue for five minutes; transaction ids are in their partition.
CREATE TABLE IF NOT EXISTS queen.sqs_deduplication (
    queue_id integer NOT NULL,
    key text NOT NULL,
    transaction_id text NOT NULL,
    partition text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (queue_id, key)
);
CREATE INDEX IF NOT EXISTS sqs_deduplication_by_time ON queen.sqs_deduplication (created_at);
COMMENT ON COLUMN queen.sqs_deduplication.transaction_id IS 'With which the message is pushed, however often it is sent.';

-- Messages of FIFO queues that were received and not consumed yet: a lease of theirs covers the whole partition.
CREATE TABLE IF NOT EXISTS queen.sqs_deliveries (
    message_id uuid PRIMARY KEY,
    queue_id integer NOT NULL,
    partition_id uuid NOT NULL,
    lease_id uuid NOT NULL,
    place integer NOT NULL,
    receives integer NOT NULL DEFAULT 1,
    deleted boolean NOT NULL DEFAULT false,
    transaction_id text NOT NULL,
    first_at timestamptz NOT NULL,
    visible_at timestamptz NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
CREATE INDEX IF NOT EXISTS sqs_deliveries_by_lease ON queen.sqs_deliveries (partition_id, lease_id, place);
COMMENT ON COLUMN queen.sqs_deliveries.place IS 'Where it stands in its lease: messages are consumed in this order.';
COMMENT ON COLUMN queen.sqs_deliveries.deleted IS 'By its consumer, while a message before it is not.';

CREATE TABLE IF NOT EXISTS queen.sqs_move_tasks (
    id uuid PRIMARY KEY,
    source text NOT NULL,
    destination text,
    per_second integer,
    status text NOT NULL DEFAULT 'RUNNING',
    moved bigint NOT NULL DEFAULT 0,
    total bigint NOT NULL DEFAULT 0,
    failure text,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    alive_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS sqs_move_tasks_by_source ON queen.sqs_move_tasks (source, started_at);
