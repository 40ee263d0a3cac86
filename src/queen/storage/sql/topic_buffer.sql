-- Write modes of namespaces, and items that are stored from the log of buffered ones.

-- name: topic_modes
-- Every namespace that has a write mode of its own.
SELECT name, write_mode FROM queen.topic_namespaces WHERE write_mode IS NOT NULL ORDER BY name;

-- name: topic_set_mode
-- Give a namespace, made if need be, a write mode of its own, or (null) none.
INSERT INTO queen.topic_namespaces (name, write_mode) VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE SET write_mode = excluded.write_mode;

-- name: topic_clock
-- PostgreSQL's clock.
SELECT extract(epoch FROM clock_timestamp())::float8 AS at;

-- name: topic_flush
-- Store items ($4 and on) of batches that were accepted earlier ($3), in the order of these, unless one of their topics
-- ($2) is gone; gives the time of it and whether they were stored. An item is due now, or later if it was to be.
-- `spool_advance` guarantees that none of them exists: ON CONFLICT DO NOTHING would cost half as much again.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at,
        (SELECT count(*) FROM queen.topics WHERE id = ANY ($2::integer[])) = cardinality($2::integer[]) AS there
    FROM held
), firsts AS MATERIALIZED (
    SELECT i.topic_id, i.priority, least(min(i.given), min(m.at)) AS head, min(m.at) AS at
    FROM moment m CROSS JOIN unnest($5::integer[], $6::integer[], $7::timestamptz[]) AS i (topic_id, priority, given)
    WHERE m.there GROUP BY i.topic_id, i.priority
), places AS MATERIALIZED (
    -- Earlier than an advanced head: because the client asked for it, or because the clock was set back.
    SELECT f.topic_id, f.priority, f.head, f.head < f.at OR EXISTS (SELECT FROM queen.topic_heads h
        WHERE h.topic_id = f.topic_id AND h.priority = f.priority AND h.head > f.head) AS behind
    FROM firsts f
), made AS (
    INSERT INTO queen.topic_heads (topic_id, priority, head)
    SELECT topic_id, priority, head - interval '5 minutes' FROM places WHERE NOT behind ORDER BY topic_id, priority
    ON CONFLICT DO NOTHING
), lowered AS (
    INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
    SELECT topic_id, priority, head - interval '5 minutes' FROM places WHERE behind ORDER BY topic_id, priority
    ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes'
), stored AS (
    INSERT INTO queen.topic_items (id, deliver_after, expires_at, created_at, updated_at, topic_id, priority, is_json,
        metadata, payload)
    SELECT i.id, coalesce(i.given, greatest(m.at + i.batch * interval '1 us',
            to_timestamp(($3::float8[])[i.batch]) + make_interval(secs => i.delay))),
        greatest(i.given,
            least(to_timestamp(($3::float8[])[i.batch]), m.at) + make_interval(secs => coalesce(i.delay, 0)))
            + make_interval(secs => coalesce(i.own_ttl, t.ttl_seconds)),
        least(to_timestamp(($3::float8[])[i.batch]), m.at), m.at, i.topic_id, i.priority, i.is_json, i.metadata,
        i.payload
    FROM moment m
    CROSS JOIN unnest($4::bigint[], $5::integer[], $6::integer[], $7::timestamptz[], $8::float8[], $9::float8[],
        $10::integer[], $11::boolean[], $12::bytea[], $13::bytea[])
        AS i (id, topic_id, priority, given, delay, own_ttl, batch, is_json, metadata, payload)
    JOIN queen.topics t ON t.id = i.topic_id
    WHERE m.there
)
SELECT extract(epoch FROM at)::float8 AS at, there FROM moment;
