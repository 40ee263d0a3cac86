-- What holds for the whole system, and how far spools were replayed.

CREATE TABLE IF NOT EXISTS queen.system_state (
    key text PRIMARY KEY,
    value jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE queen.system_state IS 'Keys maintenance_mode and pop_maintenance_mode: {"enabled": true or false}.';

-- Written in the very transaction that stores the messages, so that no record is stored twice.
CREATE TABLE IF NOT EXISTS queen.spool_progress (
    file_id uuid PRIMARY KEY,
    position bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN queen.spool_progress.position IS 'Everything before this byte of the spool file is stored.';
