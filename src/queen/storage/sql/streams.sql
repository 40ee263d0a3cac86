-- Streaming queries: registering them, and the state that their cycles read and write.

-- name: add_stream_query
-- Register a query under a name that is new; no row when it is not.
INSERT INTO queen.stream_queries (name, source_queue, sink_queue, config_hash) VALUES ($1, $2, $3, $4)
ON CONFLICT (name) DO NOTHING RETURNING id, public_id::text AS public_id;

-- name: lock_stream_query
-- A query by its name. The advisory lock waits for the cycles that are under way, and holds up new ones.
SELECT id, public_id::text AS public_id, config_hash, pg_advisory_xact_lock(hashtextextended('queen stream ' || id, 0))
FROM queen.stream_queries WHERE name = $1 FOR UPDATE;

-- name: update_stream_query
-- What a query reads, writes and is made of.
UPDATE queen.stream_queries SET source_queue = $2, sink_queue = $3, config_hash = $4, updated_at = now() WHERE id = $1;

-- name: wipe_stream_state
-- Forget everything a query keeps; how many rows that were.
WITH wiped AS (DELETE FROM queen.stream_state WHERE query_id = $1 RETURNING 1) SELECT count(*) AS rows FROM wiped;

-- name: delete_stream_query
-- Forget a query.
DELETE FROM queen.stream_queries WHERE id = $1;

-- name: stream_partitions
-- Some of the partitions for which a query keeps state: each is found by one step through the index.
WITH RECURSIVE found AS (
    (SELECT partition_id FROM queen.stream_state WHERE query_id = $1 ORDER BY partition_id LIMIT 1)
    UNION ALL
    SELECT (SELECT s.partition_id FROM queen.stream_state s
        WHERE s.query_id = $1 AND s.partition_id > f.partition_id ORDER BY s.partition_id LIMIT 1)
    FROM found f WHERE f.partition_id IS NOT NULL
)
SELECT p.id, p.name FROM (SELECT partition_id FROM found WHERE partition_id IS NOT NULL LIMIT $2) f
JOIN queen.partitions p ON p.id = f.partition_id;

-- name: stream_queries
-- Every query, by name.
SELECT public_id::text AS public_id, name, source_queue, sink_queue, config_hash, created_at, updated_at
FROM queen.stream_queries ORDER BY name;

-- name: stream_query
-- A query by its public id.
SELECT id FROM queen.stream_queries WHERE public_id = $1;

-- name: lock_stream
-- Cycles of one query on one partition go one after the other; a reset of the query waits for all of them.
SELECT pg_advisory_xact_lock_shared(hashtextextended('queen stream ' || $1::integer, 0)),
    pg_advisory_xact_lock(hashtextextended('queen stream ' || $1::integer || ' ' || $2::bigint, 0));

-- name: stream_versions
-- What a query is made of, and which of these keys have state on a partition, in which version.
SELECT q.config_hash, s.key, s.version
FROM queen.stream_queries q
LEFT JOIN queen.stream_state s ON s.partition_id = $2 AND s.query_id = $1 AND s.key = ANY($3::text[])
WHERE q.id = $1;

-- name: upsert_stream_state
-- Write state; each key once. No row: the query was deleted.
INSERT INTO queen.stream_state AS s (partition_id, query_id, key, value, window_end)
SELECT $2, $1, i.key, i.value, i.window_end FROM unnest($3::text[], $4::bytea[], $5::float8[]) AS i (key, value, window_end)
WHERE EXISTS (SELECT 1 FROM queen.stream_queries q WHERE q.id = $1)
ON CONFLICT (partition_id, query_id, key) DO UPDATE SET value = excluded.value, window_end = excluded.window_end,
    version = excluded.version, updated_at = excluded.updated_at
RETURNING 1;

-- name: delete_stream_state
-- Remove state; the keys that had some.
DELETE FROM queen.stream_state WHERE partition_id = $2 AND query_id = $1 AND key = ANY($3::text[]) RETURNING key;

-- name: stream_state
-- The state of a query on a partition, by key: all of it, or what the filters that are given leave. $3 keys, $4 and $5
-- the keys of a prefix (from, and before), $6 windows that have ended by then, $7 keys after this one, $8 so many; once
-- they have $9 bytes, the rest without values.
SELECT key, version, updated_at,
    CASE WHEN sum(octet_length(value)) OVER (ORDER BY key ROWS UNBOUNDED PRECEDING) - octet_length(value) < $9::bigint
        THEN value END AS value
FROM (
SELECT key, value, version, updated_at FROM queen.stream_state
WHERE partition_id = $2 AND query_id = $1
    AND ($3::text[] IS NULL OR key = ANY($3))
    AND ($4::text IS NULL OR key >= $4)
    AND ($5::text IS NULL OR key < $5)
    AND ($6::float8 IS NULL OR window_end <= $6)
    AND ($7::text IS NULL OR key > $7)
ORDER BY key LIMIT $8
) s
ORDER BY key;

-- name: sweep_stream_state
-- Some of the state for partitions that are gone.
WITH doomed AS MATERIALIZED (
    SELECT partition_id, query_id, key FROM queen.stream_state WHERE partition_id = ANY($1::bigint[])
    ORDER BY partition_id, query_id, key LIMIT $2
)
DELETE FROM queen.stream_state s USING doomed d
WHERE s.partition_id = d.partition_id AND s.query_id = d.query_id AND s.key = d.key RETURNING 1;

-- name: stream_query_list
-- All queries, with how much state they keep and when it last changed.
SELECT q.public_id::text AS query_id, q.name, q.source_queue, q.sink_queue, q.config_hash, q.created_at,
    coalesce(s.partitions, 0) AS partitions, coalesce(s.state_rows, 0) AS state_rows, s.changed_at
FROM queen.stream_queries q LEFT JOIN (
    SELECT query_id, count(DISTINCT partition_id) AS partitions, count(*) AS state_rows, max(updated_at) AS changed_at
    FROM queen.stream_state GROUP BY query_id
) s ON s.query_id = q.id;
