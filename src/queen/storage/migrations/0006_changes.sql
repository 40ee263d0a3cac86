-- A log of rare changes (options of queues, positions of groups, removed partitions), kept for minutes: who was not told
-- of a change reads it here. Rows are read by transaction number, so that none is passed over that commits late.

CREATE TABLE IF NOT EXISTS queen.changes (
    xid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    id bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind text NOT NULL,
    queue_id integer NOT NULL DEFAULT 0,
    partition_id bigint NOT NULL DEFAULT 0,
    name text NOT NULL DEFAULT '',
    PRIMARY KEY (xid, id)
);
COMMENT ON COLUMN queen.changes.kind IS 'As in queen.broker.events.EventKind.';

-- Whoever changes a queue, an older server or a person with psql included, leaves a note of it.
CREATE OR REPLACE FUNCTION queen.note_queue_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.changes (kind, queue_id, name)
    VALUES ('c', coalesce(NEW.id, OLD.id), coalesce(NEW.name, OLD.name));
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER note_change AFTER INSERT OR UPDATE OR DELETE ON queen.queues
FOR EACH ROW EXECUTE FUNCTION queen.note_queue_change();
