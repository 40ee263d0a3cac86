-- Tables whose rows change with every batch: rewritten when a long transaction keeps vacuum from cleaning them.

-- name: dead_rows
-- How many rows of a table are alive and how many are not, as PostgreSQL counts.
SELECT n_live_tup AS live, n_dead_tup AS dead FROM pg_stat_all_tables
WHERE relid = format('queen.%I', $1::text)::regclass;

-- name: vacuum_partitions
-- Remove dead rows that no snapshot can see.
VACUUM (TRUNCATE off, SKIP_LOCKED) queen.partitions;

-- name: vacuum_cursors
-- The same for cursors.
VACUUM (TRUNCATE off, SKIP_LOCKED) queen.cursors;

-- name: oldest_transaction
-- Who keeps dead rows from being removed: the session with the oldest transaction.
SELECT format('pid %s (%s), %s since %s', pid, coalesce(nullif(application_name, ''), usename, backend_type), state,
    to_char(xact_start, 'YYYY-MM-DD HH24:MI:SS')) AS holder
FROM (VALUES (1)) AS always
LEFT JOIN LATERAL (
    SELECT * FROM pg_stat_activity
    WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
    ORDER BY greatest(age(backend_xmin), age(backend_xid)) DESC LIMIT 1
) a ON true;

-- name: rewrite_partitions
-- Rewrite the live rows of the table. No session waits for long: the lock is acquired at once or not at all.
DO $$
DECLARE
    kept queen.partitions[];
BEGIN
    SET LOCAL lock_timeout = '100ms';
    LOCK TABLE queen.partitions IN ACCESS EXCLUSIVE MODE;
    SELECT array_agg(p) INTO kept FROM queen.partitions p;
    TRUNCATE queen.partitions;
    INSERT INTO queen.partitions OVERRIDING SYSTEM VALUE SELECT * FROM unnest(kept);
END $$;

-- name: rewrite_cursors
-- The same for cursors.
DO $$
DECLARE
    kept queen.cursors[];
BEGIN
    SET LOCAL lock_timeout = '100ms';
    LOCK TABLE queen.cursors IN ACCESS EXCLUSIVE MODE;
    SELECT array_agg(c) INTO kept FROM queen.cursors c;
    TRUNCATE queen.cursors;
    INSERT INTO queen.cursors SELECT * FROM unnest(kept);
END $$;
