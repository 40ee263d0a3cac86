-- The change log, for workers that missed a notification.

-- name: note_change
-- Log a change, in the transaction that makes it; returns its number.
INSERT INTO queen.changes (kind, queue_id, partition_id, name) VALUES ($1, $2, $3, $4) RETURNING xid;

-- name: changes_since
-- Entries of transactions from a number on, and the number to go on from: all below it have ended and were seen. There is
-- always one row. `next_xid` is the same as before when nothing at all was written in between.
SELECT h.horizon, h.next_xid, c.xid, c.id, c.kind, c.queue_id, c.partition_id, c.name
FROM (
    SELECT
        pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS horizon,
        pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next_xid
) h
LEFT JOIN queen.changes c ON c.xid >= $1
ORDER BY c.xid, c.id;

-- name: count_workers
-- The workers of all hosts on this database, by the connections that each of them keeps.
SELECT count(*) AS workers FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1;

-- name: remove_old_changes
-- Entries that every worker has read by now, some at a time.
DELETE FROM queen.changes WHERE (xid, id) IN (
    SELECT xid, id FROM queen.changes WHERE at < clock_timestamp() - make_interval(secs => $1::float8) LIMIT $2
) RETURNING 1;
