-- Backups and restores: one moment of a database, and room for it to come back.

-- name: backup_is_queen
-- Whether a database holds a Queen.
SELECT to_regclass('queen.spool_progress') IS NOT NULL;

-- name: backup_lock_timeout
-- How long the replay of the spool may take to pause.
SET LOCAL lock_timeout = '30s';

-- name: backup_hold_replay
-- The replay of the spool writes here in the transaction that stores what it replayed: until this lock is released, nothing leaves
-- the spool.
LOCK TABLE queen.spool_progress IN SHARE MODE;

-- name: backup_snapshot
-- The moment of this transaction, for others to look at as well.
SELECT pg_export_snapshot();

-- name: backup_schema_version
-- The newest migration that was applied.
SELECT max(version) FROM queen.schema_migrations;

-- name: backup_counts
-- What a database holds: a restore must find the same.
SELECT
    (SELECT count(*) FROM queen.queues) AS "queues",
    (SELECT count(*) FROM queen.partitions) AS "partitions",
    (SELECT coalesce(sum(count), 0)::bigint FROM queen.segments) AS "messages",
    (SELECT count(*) FROM queen.cursors) AS "cursors",
    (SELECT coalesce(sum(committed), 0)::bigint FROM queen.cursors) AS "committed",
    (SELECT count(*) FROM queen.dead_letters) AS "deadLetters",
    (SELECT count(*) FROM queen.traces) AS "traces",
    (SELECT count(*) FROM queen.topic_items) AS "topicItems";

-- name: restore_connections
-- How many connections servers have to this database.
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    AND application_name LIKE 'queen%';

-- name: restore_is_empty
-- Whether a database holds nothing of a Queen.
SELECT to_regnamespace('queen') IS NULL;

-- name: restore_drop
-- Remove all of a Queen.
DROP SCHEMA IF EXISTS queen, queen_proxy CASCADE;

-- name: restore_analyze
-- Have the planner know what came back.
ANALYZE;

-- name: restore_privileges
-- The role of those who push by SQL, and its rights, as migration 0016 makes them: privileges are not restored, because
-- they name roles of the old cluster, and roles are in no dump.
DO $$
BEGIN
    IF to_regproc('queen.enqueue_items') IS NULL THEN
        -- A backup from before that migration.
        RETURN;
    END IF;
    REVOKE EXECUTE ON FUNCTION queen.push, queen.push_many, queen.push_items, queen.enqueue, queen.enqueue_many,
        queen.enqueue_items FROM PUBLIC;
    BEGIN
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'queen_producer') THEN
            CREATE ROLE queen_producer NOLOGIN;
        END IF;
        GRANT USAGE ON SCHEMA queen TO queen_producer;
        GRANT EXECUTE ON FUNCTION queen.push, queen.push_many, queen.push_items, queen.enqueue, queen.enqueue_many,
            queen.enqueue_items TO queen_producer;
    EXCEPTION
        WHEN insufficient_privilege THEN
            RAISE NOTICE 'role queen_producer was not created: % may not create roles', current_user;
    END;
END $$;
