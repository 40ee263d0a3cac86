-- Copying everything to another PostgreSQL: what the server does for the page Migration.

-- name: copy_state
-- The last copy, how long ago that was written, and whether the session that makes the copy is alive.
SELECT s.value::text AS state, extract(epoch FROM clock_timestamp() - s.updated_at)::float8 AS age,
    EXISTS (
        SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
            AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND l.classid::bigint = $1::bigint >> 32 AND l.objid::bigint = $1::bigint & 4294967295
    ) AS running
FROM queen.system_state s WHERE s.key = 'migration';

-- name: copy_save_state
-- Write how far the copy is.
INSERT INTO queen.system_state (key, value, updated_at) VALUES ('migration', $1::text::jsonb, clock_timestamp())
ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at;

-- name: copy_modes
-- Whether both maintenance modes are on, and for how long.
SELECT count(*) FILTER (WHERE (value ->> 'enabled')::boolean) = 2 AS resting,
    extract(epoch FROM clock_timestamp() - max(updated_at))::float8 AS age
FROM queen.system_state WHERE key IN ('maintenance_mode', 'pop_maintenance_mode');

-- name: copy_identity
-- Identifies the database, whatever address it was reached by.
SELECT (SELECT system_identifier FROM pg_control_system()) AS cluster, oid AS database
FROM pg_database WHERE datname = current_database();

-- name: copy_count_text
-- The statement that counts the rows of all tables.
SELECT string_agg(format('SELECT %L AS name, count(*) AS rows FROM %s', regexp_replace(t.name, '^queen\.', ''), t.name), ' UNION ALL ')
FROM (
    SELECT format('%I.%I', n.nspname, c.relname) AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname IN ('queen', 'queen_proxy') AND c.relkind = 'r' ORDER BY 1
) t;

-- name: copy_version
-- What a target is.
SELECT version();
