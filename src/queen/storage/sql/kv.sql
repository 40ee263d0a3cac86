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
-- Keys as they are now, and a new version for each that may be written ($3); once they have $4 bytes, the rest without values.
SELECT i.slot, clock_timestamp() AS now, CASE WHEN i.written THEN nextval('queen.kv_versions') END AS drawn,
    CASE WHEN sum(octet_length(k.value)) OVER (ORDER BY i.slot ROWS UNBOUNDED PRECEDING) - octet_length(k.value) < $4::bigint
        THEN k.value END AS value,
    k.version, k.expires_at, k.updated_at
FROM unnest($1::text[], $2::text[], $3::boolean[]) WITH ORDINALITY AS i (namespace, key, written, slot)
LEFT JOIN queen.kv k ON k.namespace = i.namespace AND k.key = i.key
    AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
ORDER BY i.slot;

-- name: kv_prefix
-- Keys of a namespace ($1) that start with a text ($2), after one of them ($3), in order, $4 at most; once they have $5 bytes,
-- the rest without values.
SELECT key, version, expires_at, updated_at,
    CASE WHEN sum(octet_length(value)) OVER (ORDER BY key ROWS UNBOUNDED PRECEDING) - octet_length(value) < $5::bigint
        THEN value END AS value
FROM (
SELECT key, value, version, expires_at, updated_at FROM queen.kv
WHERE namespace = $1 AND key >= $2 AND key < $2 || chr(1114111) AND key > $3 AND starts_with(key, $2)
    AND (expires_at IS NULL OR expires_at > clock_timestamp())
ORDER BY key LIMIT $4
) k
ORDER BY key;

-- name: kv_namespaces
-- A page ($3, $4) of the namespaces with a text ($1) in their names (empty: any), but one ($2), by name: how many keys each
-- has, counted up to $5, and how many namespaces there are. The index is read once for each namespace.
WITH RECURSIVE found (namespace) AS (
    (SELECT namespace FROM queen.kv ORDER BY namespace LIMIT 1)
    UNION ALL
    SELECT (SELECT k.namespace FROM queen.kv k WHERE k.namespace > f.namespace ORDER BY k.namespace LIMIT 1)
    FROM found f WHERE f.namespace IS NOT NULL
), wanted AS (
    SELECT namespace FROM found WHERE namespace <> $2 AND ($1::text = '' OR position(lower($1) IN lower(namespace)) > 0)
)
SELECT w.namespace, (SELECT count(*) FROM wanted) AS total, (
    SELECT count(*) FROM (
        SELECT FROM queen.kv k WHERE k.namespace = w.namespace AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
        LIMIT $5
    ) c
) AS keys
FROM wanted w ORDER BY w.namespace LIMIT $3 OFFSET $4;

-- name: kv_page
-- A page ($3, $4) of the keys of a namespace ($1) that start with a text ($2), in order; values of more than $5 bytes are
-- left out.
SELECT key, version, expires_at, updated_at, octet_length(value) AS bytes,
    CASE WHEN octet_length(value) <= $5 THEN value END AS value
FROM queen.kv
WHERE namespace = $1 AND key >= $2 AND key < $2 || chr(1114111) AND starts_with(key, $2)
    AND (expires_at IS NULL OR expires_at > clock_timestamp())
ORDER BY key LIMIT $3 OFFSET $4;

-- name: kv_count
-- How many keys of a namespace ($1) start with a text ($2), counted up to $3.
SELECT count(*) AS found FROM (
    SELECT FROM queen.kv
    WHERE namespace = $1 AND key >= $2 AND key < $2 || chr(1114111) AND starts_with(key, $2)
        AND (expires_at IS NULL OR expires_at > clock_timestamp())
    LIMIT $3
) k;

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
