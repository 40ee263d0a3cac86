-- Streaming queries and the state they keep: open windows, open sessions, watermarks, gates.

CREATE TABLE IF NOT EXISTS queen.stream_queries (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    public_id uuid NOT NULL UNIQUE DEFAULT gen_random_uuid(),
    name text NOT NULL UNIQUE,
    source_queue text NOT NULL,
    sink_queue text,
    config_hash text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN queen.stream_queries.config_hash IS 'Fingerprint of the operators: state made by others is not theirs.';

-- One row per key of a query on a source partition. No foreign key: checking it would lock one row of stream_queries
-- for every cycle of every partition.
CREATE TABLE IF NOT EXISTS queen.stream_state (
    partition_id bigint NOT NULL,
    query_id integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    window_end float8,
    version bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (partition_id, query_id, key)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
CREATE INDEX IF NOT EXISTS stream_state_by_end ON queen.stream_state (query_id, partition_id, window_end);
COMMENT ON COLUMN queen.stream_state.value IS 'JSON, sealed like a segment body.';
COMMENT ON COLUMN queen.stream_state.window_end IS 'The number at windowEnd of the value, in epoch milliseconds.';
COMMENT ON COLUMN queen.stream_state.version IS 'The transaction that wrote the row: never the same for two writes of it.';
