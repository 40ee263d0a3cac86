-- Migrations: which ones this database has.

-- name: migration_lock
-- One session migrates at a time.
SELECT pg_advisory_lock($1);

-- name: migration_create_schema
-- The schema that everything is in.
CREATE SCHEMA IF NOT EXISTS queen;

-- name: migration_create_table
-- The list of migrations that were applied.
CREATE TABLE IF NOT EXISTS queen.schema_migrations
    (version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now());

-- name: migration_versions
-- The migrations that were applied.
SELECT version FROM queen.schema_migrations;

-- name: migration_applied
-- A migration was applied.
INSERT INTO queen.schema_migrations (version, name) VALUES ($1, $2);
