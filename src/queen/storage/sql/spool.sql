-- Maintenance modes, and how far spools were replayed.

-- name: system_modes
-- The modes that are on or were; asked often, and thereby whether PostgreSQL is there.
SELECT key, coalesce((value ->> 'enabled')::boolean, false) AS enabled FROM queen.system_state
WHERE key IN ('maintenance_mode', 'pop_maintenance_mode');

-- name: set_system_mode
-- Switch a mode on or off.
INSERT INTO queen.system_state (key, value) VALUES ($1, jsonb_build_object('enabled', $2::boolean))
ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now();

-- name: spool_progress
-- How far spool files were replayed.
SELECT file_id, position FROM queen.spool_progress WHERE file_id = ANY($1::uuid[]);

-- name: spool_advance
-- Spool files are replayed up to a byte each; belongs to the transaction that stores what is before it.
INSERT INTO queen.spool_progress (file_id, position)
SELECT * FROM unnest($1::uuid[], $2::bigint[])
ON CONFLICT (file_id) DO UPDATE SET position = excluded.position, updated_at = now();

-- name: spool_forget
-- Spool files are gone.
DELETE FROM queen.spool_progress WHERE file_id = ANY($1::uuid[]);
