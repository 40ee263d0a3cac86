-- name: applied_migrations
-- Which migrations this database has; asked by probes, which learn at the same time that somebody answers.
SELECT version FROM queen.schema_migrations;
