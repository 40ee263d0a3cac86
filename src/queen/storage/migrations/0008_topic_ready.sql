-- Ready queues of hot topics: items leased ahead of the consumers they will be handed out to.
--
-- An item that was prefetched has leased_until = 'infinity' and no lease_owner. Its lease is that of the whole queue.

CREATE TABLE IF NOT EXISTS queen.topic_ready (
    topic_id integer PRIMARY KEY,
    token text,
    turn bigint NOT NULL DEFAULT 0,
    until timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);
COMMENT ON TABLE queen.topic_ready IS 'Topics that are served from a ready queue: nobody else leases their items.';
COMMENT ON COLUMN queen.topic_ready.token IS 'Which queue; null: none may be opened until the time.';
COMMENT ON COLUMN queen.topic_ready.turn IS 'How often the queue was changed; one that counts otherwise has lost something.';
COMMENT ON COLUMN queen.topic_ready.until IS 'The lease of the queue, and of all items in it.';

-- What was handed out of ready queues in the last second or two; then it is written to the items, should they still exist.
CREATE TABLE IF NOT EXISTS queen.topic_handouts (
    owner text PRIMARY KEY,
    topic_id integer NOT NULL,
    leased_until timestamptz NOT NULL,
    handed_at timestamptz NOT NULL,
    ids bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
ALTER TABLE queen.topic_handouts ALTER COLUMN ids SET STORAGE MAIN;
CREATE INDEX IF NOT EXISTS topic_handouts_by_topic ON queen.topic_handouts (topic_id);
