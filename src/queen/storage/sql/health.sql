-- name: applied_migrations
-- Which migrations this database has; read by health probes.
SELECT version FROM queen.schema_migrations;
