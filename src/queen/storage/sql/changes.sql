-- The log of rare changes, for those who were not told of one.

-- name: note_change
-- Leave a note of a change, in the transaction that makes it; returns its number.
INSERT INTO queen.changes (kind, queue_id, partition_id, name) VALUES ($1, $2, $3, $4) RETURNING xid;

-- name: changes_since
-- Notes of transactions from a number on, and the number to go on from: all below it have ended and were seen. There is
-- always one row.
SELECT h.horizon, c.xid, c.id, c.kind, c.queue_id, c.partition_id, c.name
FROM (SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS horizon) h
LEFT JOIN queen.changes c ON c.xid >= $1
ORDER BY c.xid, c.id;

-- name: remove_old_changes
-- Notes that everybody has read by now, some at a time.
DELETE FROM queen.changes WHERE (xid, id) IN (
    SELECT xid, id FROM queen.changes WHERE at < clock_timestamp() - make_interval(secs => $1::float8) LIMIT $2
) RETURNING 1;
