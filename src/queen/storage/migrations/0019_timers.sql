-- Timers: messages that are pushed at a time, unless they are rescheduled or cancelled before.

CREATE TABLE queen.timers (
    queue text NOT NULL,
    key text COLLATE "C" NOT NULL,
    id uuid NOT NULL,
    partition text NOT NULL,
    transaction_id text NOT NULL,
    body bytea NOT NULL,
    deliver_at timestamptz NOT NULL,
    scheduled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts integer NOT NULL DEFAULT 0,
    last_error text,
    PRIMARY KEY (queue, key)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX timers_by_time ON queen.timers (deliver_at);
COMMENT ON COLUMN queen.timers.body IS 'The payload, sealed like a segment body.';
COMMENT ON COLUMN queen.timers.attempts IS 'How often it was due and could not be pushed.';

-- Payloads are never searched: nobody needs to know what is common among them.
ALTER TABLE queen.timers ALTER COLUMN body SET STATISTICS 0;
