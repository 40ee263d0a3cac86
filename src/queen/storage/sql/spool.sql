-- Maintenance modes, and the positions up to which spool files are stored.

-- name: system_modes
-- The modes that are or were on. Also the heartbeat that says whether PostgreSQL is available.
SELECT key, coalesce((value ->> 'enabled')::boolean, false) AS enabled FROM queen.system_state
WHERE key IN ('maintenance_mode', 'pop_maintenance_mode');

-- name: set_system_mode
-- Switch a mode on or off.
INSERT INTO queen.system_state (key, value) VALUES ($1, jsonb_build_object('enabled', $2::boolean))
ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now();

-- name: spool_progress
-- The positions of spool files.
SELECT file_id, position FROM queen.spool_progress WHERE file_id = ANY($1::uuid[]);

-- name: spool_advance
-- Move the positions of spool files from a byte to another, in the transaction that stores what is in between. Returns
-- the files that were at the first byte, or had no position yet.
INSERT INTO queen.spool_progress AS p (file_id, position)
SELECT f.file_id, f.upto FROM unnest($1::uuid[], $3::bigint[]) AS f (file_id, upto) ORDER BY f.file_id
ON CONFLICT (file_id) DO UPDATE SET position = excluded.position, updated_at = now()
    WHERE p.position = (SELECT s.since FROM unnest($1::uuid[], $2::bigint[]) AS s (file_id, since)
        WHERE s.file_id = p.file_id)
RETURNING p.file_id;

-- name: spool_forget
-- Spool files were removed.
DELETE FROM queen.spool_progress WHERE file_id = ANY($1::uuid[]);

-- name: spool_retire
-- Spool files were removed, but copies of their records may exist for a while.
UPDATE queen.spool_progress SET gone_at = now() WHERE file_id = ANY($1::uuid[]);

-- name: spool_forget_retired
-- Forget the positions of files of which no copies can exist.
DELETE FROM queen.spool_progress WHERE gone_at < now() - interval '2 days';
