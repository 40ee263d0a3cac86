-- Messages that are written but not published yet: all of a batch become messages together, and once.

-- Unlogged: what a crash of PostgreSQL takes is missed when the batch is published, and the batch is written again.
CREATE UNLOGGED TABLE IF NOT EXISTS queen.stages (
    run text NOT NULL,
    batch bigint NOT NULL,
    attempt uuid NOT NULL,
    seq bigint NOT NULL,
    partition_id bigint NOT NULL,
    queue text NOT NULL,
    partition text NOT NULL,
    count integer NOT NULL,
    named boolean NOT NULL,
    staged_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    hashes bytea NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (run, batch, attempt, seq)
) WITH (toast_tuple_target = 8160);
ALTER TABLE queen.stages ALTER COLUMN hashes SET STORAGE EXTERNAL, ALTER COLUMN body SET STORAGE EXTERNAL;
COMMENT ON TABLE queen.stages IS 'One row for each segment to be; for items of topics, one for each array of them.';
COMMENT ON COLUMN queen.stages.run IS 'Who writes: the id of a streaming query, or one drawn for a single write.';
COMMENT ON COLUMN queen.stages.attempt IS 'One attempt of one task. Only those that are named when a batch is published count.';
COMMENT ON COLUMN queen.stages.partition_id IS '0: the body is a sealed JSON array of items for topics.';
COMMENT ON COLUMN queen.stages.named IS 'Whether transaction ids were given by the writer: then there may be duplicates.';
COMMENT ON COLUMN queen.stages.hashes IS '8 bytes for each transaction id, for this partition_id.';

CREATE TABLE IF NOT EXISTS queen.stage_runs (
    run text PRIMARY KEY,
    batch bigint NOT NULL,
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    messages bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
COMMENT ON COLUMN queen.stage_runs.batch IS 'Batches up to this one are published.';
COMMENT ON COLUMN queen.stage_runs.messages IS 'What the last batch published.';
