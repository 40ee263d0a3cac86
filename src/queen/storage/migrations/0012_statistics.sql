-- Payloads are never searched, so nobody needs to know what is common among them. Looking at them kept the snapshot of
-- an automatic ANALYZE open for a second at a time, several times a minute under load: long enough for the rows of
-- partitions and cursors, each updated hundreds of times a second, to pile up and slow every statement down.

ALTER TABLE queen.segments
    ALTER COLUMN ids SET STATISTICS 0,
    ALTER COLUMN body SET STATISTICS 0,
    ALTER COLUMN count SET STATISTICS 0,
    -- The column that wants most decides how many rows are read: 300 for each unit. Ten are enough for these.
    ALTER COLUMN partition_id SET STATISTICS 10,
    ALTER COLUMN base_offset SET STATISTICS 10,
    ALTER COLUMN created_at SET STATISTICS 10;

ALTER TABLE queen.topic_items
    ALTER COLUMN payload SET STATISTICS 0,
    ALTER COLUMN metadata SET STATISTICS 0,
    ALTER COLUMN last_error SET STATISTICS 0,
    ALTER COLUMN idempotency_key SET STATISTICS 0,
    ALTER COLUMN lease_owner SET STATISTICS 0,
    ALTER COLUMN id SET STATISTICS 10,
    ALTER COLUMN deliver_after SET STATISTICS 10,
    ALTER COLUMN leased_until SET STATISTICS 10,
    ALTER COLUMN expires_at SET STATISTICS 10,
    ALTER COLUMN created_at SET STATISTICS 10,
    ALTER COLUMN updated_at SET STATISTICS 10,
    ALTER COLUMN first_failed_at SET STATISTICS 10,
    ALTER COLUMN topic_id SET STATISTICS 10,
    ALTER COLUMN priority SET STATISTICS 10,
    ALTER COLUMN retries SET STATISTICS 10,
    ALTER COLUMN is_json SET STATISTICS 10;

ALTER TABLE queen.stages ALTER COLUMN hashes SET STATISTICS 0, ALTER COLUMN body SET STATISTICS 0;
ALTER TABLE queen.dead_letters ALTER COLUMN body SET STATISTICS 0;
ALTER TABLE queen.topic_dead_letters ALTER COLUMN payload SET STATISTICS 0, ALTER COLUMN metadata SET STATISTICS 0;
ALTER TABLE queen.traces ALTER COLUMN data SET STATISTICS 0;
ALTER TABLE queen.stream_state ALTER COLUMN value SET STATISTICS 0;
