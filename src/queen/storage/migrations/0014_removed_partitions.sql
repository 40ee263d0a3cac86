-- Where the logs of removed partitions ended: a stream that comes back after its partition was removed knows by it
-- whether messages were lost. Kept for 30 days; every removal takes some older ones away.
CREATE TABLE queen.removed_partitions (
    partition_id bigint PRIMARY KEY,
    name text NOT NULL,
    next_offset bigint NOT NULL,
    removed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX removed_partitions_by_time ON queen.removed_partitions (removed_at);

CREATE FUNCTION queen.remember_removed_partitions() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.removed_partitions (partition_id, name, next_offset)
    SELECT id, name, next_offset FROM removed WHERE next_offset > 0
    ON CONFLICT (partition_id) DO UPDATE SET next_offset = excluded.next_offset, removed_at = excluded.removed_at;
    DELETE FROM queen.removed_partitions WHERE partition_id IN (
        SELECT partition_id FROM queen.removed_partitions WHERE removed_at < now() - interval '30 days'
        ORDER BY removed_at LIMIT 1000 FOR UPDATE SKIP LOCKED
    );
    RETURN NULL;
END $$;

CREATE TRIGGER remember_removed AFTER DELETE ON queen.partitions REFERENCING OLD TABLE AS removed
    FOR EACH STATEMENT EXECUTE FUNCTION queen.remember_removed_partitions();
