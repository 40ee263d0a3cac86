-- What `queen pipeline rollup` makes of stored messages, cursors and dead letters, minute by minute.

CREATE TABLE IF NOT EXISTS queen.rollup_minutes (
    minute timestamptz NOT NULL,
    queue_name text NOT NULL,
    group_name text NOT NULL DEFAULT '',
    messages bigint,
    bytes bigint,
    largest_bytes bigint,
    partitions bigint,
    delivered bigint,
    latency_ms double precision,
    latency_max_ms double precision,
    consumed bigint,
    consumed_total bigint,
    lag_messages bigint,
    lag_seconds double precision,
    errors bigint,
    rolled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue_name, group_name, minute)
);
CREATE INDEX IF NOT EXISTS rollup_minutes_by_time ON queen.rollup_minutes (minute);
COMMENT ON TABLE queen.rollup_minutes IS 'A minute is rolled up anew as a whole, so doing it twice counts nothing twice.';
COMMENT ON COLUMN queen.rollup_minutes.group_name IS 'Empty: the queue itself, with what was stored and delivered.';
COMMENT ON COLUMN queen.rollup_minutes.latency_ms IS 'Sum over the delivered messages, from push to delivery.';
COMMENT ON COLUMN queen.rollup_minutes.consumed_total IS 'All that the group ever consumed, as of the sample in this minute.';
