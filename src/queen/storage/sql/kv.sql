-- Keys and values. Writers of a key take an advisory lock, which also stands for keys that do not exist: a condition is
-- judged, and the version drawn, while no other session can write the key.

-- name: kv_lock
-- Lock keys until the transaction ends, in one order; those that are only to stay as they are ($4) with others.
SELECT CASE WHEN l.shared THEN pg_advisory_xact_lock_shared($1::integer, l.bucket)
    ELSE pg_advisory_xact_lock($1::integer, l.bucket) END
FROM (
    SELECT (hashtextextended(i.key, hashtextextended(i.namespace, 0)) & 4095)::integer AS bucket, bool_and(i.shared) AS shared
    FROM unnest($2::text[], $3::text[], $4::boolean[]) AS i (namespace, key, shared)
    GROUP BY 1 ORDER BY 1
) l;

-- name: kv_hold_queues
-- Keep the queues of namespaces on this shard until the transaction ends; those that are here.
SELECT name FROM queen.queues WHERE name = ANY ($1::text[]) ORDER BY id FOR KEY SHARE;

-- name: kv_load
-- Keys as they are now, and a new version for each that may be written ($3).
SELECT i.slot, clock_timestamp() AS now, CASE WHEN i.written THEN nextval('queen.kv_versions') END AS drawn,
    k.value, k.version, k.expires_at, k.updated_at
FROM unnest($1::text[], $2::text[], $3::boolean[]) WITH ORDINALITY AS i (namespace, key, written, slot)
LEFT JOIN queen.kv k ON k.namespace = i.namespace AND k.key = i.key
    AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
ORDER BY i.slot;

-- name: kv_prefix
-- Keys of a namespace ($1) that start with a text ($2), after one of them ($3), in order.
SELECT key, value, version, expires_at, updated_at FROM queen.kv
WHERE namespace = $1 AND key >= $2 AND key < $2 || chr(1114111) AND key > $3 AND starts_with(key, $2)
    AND (expires_at IS NULL OR expires_at > clock_timestamp())
ORDER BY key LIMIT $4;

-- name: kv_store
-- Write locked keys.
INSERT INTO queen.kv (namespace, key, value, version, expires_at, updated_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::timestamptz[], $6::timestamptz[])
ON CONFLICT (namespace, key) DO UPDATE SET value = excluded.value, version = excluded.version,
    expires_at = excluded.expires_at, updated_at = excluded.updated_at;

-- name: kv_remove
-- Delete locked keys.
DELETE FROM queen.kv k USING unnest($1::text[], $2::text[]) AS i (namespace, key)
WHERE k.namespace = i.namespace AND k.key = i.key;

-- name: kv_remove_namespace
-- Delete all keys of a namespace.
DELETE FROM queen.kv WHERE namespace = $1;

-- name: kv_expire
-- Remove some keys that have expired.
DELETE FROM queen.kv k USING (
    SELECT namespace, key FROM queen.kv WHERE expires_at <= clock_timestamp() ORDER BY expires_at LIMIT $1
    FOR UPDATE SKIP LOCKED
) d
WHERE k.namespace = d.namespace AND k.key = d.key RETURNING 1;

-- name: kv_last_version
-- The version that was drawn last.
SELECT last_value FROM queen.kv_versions;

-- name: kv_raise_versions
-- Draw versions above one of another shard from now on. What is drawn at this moment is far below it.
SELECT setval('queen.kv_versions', $1::bigint + 1000000) FROM queen.kv_versions WHERE last_value < $1;
