-- What `queen doctor` looks at in PostgreSQL.

-- name: doctor_setting
-- The value of a setting of PostgreSQL, in its unit.
SELECT setting FROM pg_settings WHERE name = $1;

-- name: doctor_clock
-- The time there.
SELECT clock_timestamp();

-- name: doctor_has_schema
-- Whether migrations were ever applied here.
SELECT to_regclass('queen.schema_migrations') IS NOT NULL;

-- name: doctor_migrations
-- The migrations that were applied.
SELECT version FROM queen.schema_migrations;

-- name: doctor_indexes
-- The indexes of our tables, and whether each can be used.
SELECT c.relname, i.indisvalid FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname LIKE 'queen%';

-- name: doctor_transactions
-- Transactions that have been open for so many seconds: they keep dead rows from being removed.
SELECT pid, state, extract(epoch FROM now() - xact_start)::float8 AS seconds, left(query, 60) AS query
FROM pg_stat_activity WHERE xact_start < now() - make_interval(secs => $1) AND backend_type = 'client backend';

-- name: doctor_connections
-- How many connections there are, and may be.
SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used,
    current_setting('max_connections')::int AS most;

-- name: doctor_oldest_transaction
-- How many transactions ago the oldest id was given that is not frozen.
SELECT max(age(datfrozenxid)) FROM pg_database;
