-- What workers counted: in all, and minute by minute. A life is one run of a worker's counters.

CREATE TABLE IF NOT EXISTS queen.metric_lives (
    life uuid PRIMARY KEY,
    host text NOT NULL,
    port integer NOT NULL,
    worker_id integer NOT NULL,
    pid integer NOT NULL,
    flush integer NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    push_requests bigint NOT NULL DEFAULT 0,
    push_messages bigint NOT NULL DEFAULT 0,
    pop_requests bigint NOT NULL DEFAULT 0,
    pop_messages bigint NOT NULL DEFAULT 0,
    pop_empty bigint NOT NULL DEFAULT 0,
    auto_acked bigint NOT NULL DEFAULT 0,
    ack_requests bigint NOT NULL DEFAULT 0,
    ack_success bigint NOT NULL DEFAULT 0,
    ack_failed bigint NOT NULL DEFAULT 0,
    transactions bigint NOT NULL DEFAULT 0,
    dead_letters bigint NOT NULL DEFAULT 0,
    partitions_created bigint NOT NULL DEFAULT 0,
    partitions_deleted bigint NOT NULL DEFAULT 0,
    lag_ms double precision NOT NULL DEFAULT 0,
    lag_max_ms double precision NOT NULL DEFAULT 0,
    db_errors bigint NOT NULL DEFAULT 0,
    batches bigint NOT NULL DEFAULT 0,
    http_responses bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE queen.metric_lives IS 'All that a worker ever counted. Those long gone are summed up in the life of zeros.';

-- Numbers that go up and down are kept as {mean, lowest, highest, last} of their samples.
CREATE TABLE IF NOT EXISTS queen.metric_minutes (
    life uuid NOT NULL,
    flush integer NOT NULL,
    host text NOT NULL,
    port integer NOT NULL,
    worker_id integer NOT NULL,
    pid integer NOT NULL,
    at timestamptz NOT NULL,
    seconds double precision NOT NULL,
    push_requests bigint NOT NULL DEFAULT 0,
    push_messages bigint NOT NULL DEFAULT 0,
    pop_requests bigint NOT NULL DEFAULT 0,
    pop_messages bigint NOT NULL DEFAULT 0,
    pop_empty bigint NOT NULL DEFAULT 0,
    auto_acked bigint NOT NULL DEFAULT 0,
    ack_requests bigint NOT NULL DEFAULT 0,
    ack_success bigint NOT NULL DEFAULT 0,
    ack_failed bigint NOT NULL DEFAULT 0,
    transactions bigint NOT NULL DEFAULT 0,
    dead_letters bigint NOT NULL DEFAULT 0,
    partitions_created bigint NOT NULL DEFAULT 0,
    partitions_deleted bigint NOT NULL DEFAULT 0,
    lag_ms double precision NOT NULL DEFAULT 0,
    lag_max_ms double precision NOT NULL DEFAULT 0,
    db_errors bigint NOT NULL DEFAULT 0,
    batches bigint NOT NULL DEFAULT 0,
    http_responses bigint NOT NULL DEFAULT 0,
    loop_lag_ms double precision[],
    free_slots double precision[],
    job_queue double precision[],
    db_connections double precision[],
    pool_size double precision[],
    pool_idle double precision[],
    pool_active double precision[],
    in_flight double precision[],
    parked double precision[],
    cpu_user double precision[],
    cpu_system double precision[],
    rss_bytes double precision[],
    virtual_bytes double precision[],
    PRIMARY KEY (life, flush)
);
CREATE INDEX IF NOT EXISTS metric_minutes_by_time ON queen.metric_minutes (at);
COMMENT ON COLUMN queen.metric_minutes.at IS 'When the counting began that this row is the sum of.';

CREATE TABLE IF NOT EXISTS queen.metric_queue_minutes (
    life uuid NOT NULL,
    flush integer NOT NULL,
    host text NOT NULL,
    worker_id integer NOT NULL,
    queue_name text NOT NULL,
    at timestamptz NOT NULL,
    seconds double precision NOT NULL,
    push_requests bigint NOT NULL DEFAULT 0,
    push_messages bigint NOT NULL DEFAULT 0,
    pop_requests bigint NOT NULL DEFAULT 0,
    pop_messages bigint NOT NULL DEFAULT 0,
    pop_empty bigint NOT NULL DEFAULT 0,
    auto_acked bigint NOT NULL DEFAULT 0,
    ack_requests bigint NOT NULL DEFAULT 0,
    ack_success bigint NOT NULL DEFAULT 0,
    ack_failed bigint NOT NULL DEFAULT 0,
    transactions bigint NOT NULL DEFAULT 0,
    dead_letters bigint NOT NULL DEFAULT 0,
    partitions_created bigint NOT NULL DEFAULT 0,
    partitions_deleted bigint NOT NULL DEFAULT 0,
    lag_ms double precision NOT NULL DEFAULT 0,
    lag_max_ms double precision NOT NULL DEFAULT 0,
    parked double precision NOT NULL DEFAULT 0,
    partition_count bigint,
    PRIMARY KEY (life, flush, queue_name)
);
CREATE INDEX IF NOT EXISTS metric_queue_minutes_by_time ON queen.metric_queue_minutes (at);
CREATE INDEX IF NOT EXISTS metric_queue_minutes_by_queue ON queen.metric_queue_minutes (queue_name, at);

-- History between two times, with rows that a host has counted but not flushed yet: given as JSON, and left out should
-- they have been flushed meanwhile.
CREATE OR REPLACE FUNCTION queen.metric_minutes_between(since timestamptz, upto timestamptz, unflushed jsonb)
RETURNS SETOF queen.metric_minutes LANGUAGE sql STABLE AS $$
    SELECT * FROM queen.metric_minutes WHERE at >= since AND at < upto
    UNION ALL
    SELECT r.* FROM jsonb_populate_recordset(NULL::queen.metric_minutes, unflushed) r
    WHERE r.at >= since AND r.at < upto AND NOT EXISTS (
        SELECT FROM queen.metric_minutes m WHERE m.life = r.life AND m.flush = r.flush)
$$;
CREATE OR REPLACE FUNCTION queen.metric_queue_minutes_between(since timestamptz, upto timestamptz, unflushed jsonb)
RETURNS SETOF queen.metric_queue_minutes LANGUAGE sql STABLE AS $$
    SELECT * FROM queen.metric_queue_minutes WHERE at >= since AND at < upto
    UNION ALL
    SELECT r.* FROM jsonb_populate_recordset(NULL::queen.metric_queue_minutes, unflushed) r
    WHERE r.at >= since AND r.at < upto AND NOT EXISTS (
        SELECT FROM queen.metric_queue_minutes m WHERE m.life = r.life AND m.flush = r.flush)
$$;

-- A message is looked up by its transaction id among dead letters and traces too.
CREATE INDEX IF NOT EXISTS dead_letters_by_transaction ON queen.dead_letters (partition_id, transaction_id);
CREATE INDEX IF NOT EXISTS traces_by_transaction ON queen.traces (partition_id, transaction_id);
