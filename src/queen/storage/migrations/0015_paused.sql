-- Queues, groups and topics from which nothing is delivered until they are resumed.

ALTER TABLE queen.queues
    ADD COLUMN IF NOT EXISTS paused boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS paused_groups text[] NOT NULL DEFAULT '{}';
COMMENT ON COLUMN queen.queues.paused_groups IS 'Names of the groups that are paused on this queue.';

ALTER TABLE queen.topics ADD COLUMN IF NOT EXISTS paused boolean NOT NULL DEFAULT false;
