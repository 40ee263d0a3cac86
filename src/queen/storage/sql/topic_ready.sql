-- Prefetch buffers of topics ("ready queues"), and the items handed out of them.
--
-- While a topic has a buffer, items are leased through it alone by servers with buffers. An item in it has
-- leased_until = 'infinity' and no lease_owner. Handing out is one row in topic_handouts; seconds later that is written
-- to those of its items that still exist. Handing out, prefetching and closing update the row in topic_ready, which
-- serialises them. The row counts turns, as the queue in Redis does: a Redis that went back in time is detected.

-- name: topic_ready_short_wait
-- Give up locks of this transaction after a short wait, as others wait behind it.
SELECT set_config('lock_timeout', '100', true);

-- name: topic_ready_lock
-- Exclude claims until this transaction ends. They take their snapshot after their locks, so later ones see its result.
LOCK TABLE queen.topic_ready IN ACCESS EXCLUSIVE MODE;

-- name: topic_ready_open
-- Give a topic a buffer, unless it has one or may have none; returns its token.
INSERT INTO queen.topic_ready AS r (topic_id, token, until)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3))
ON CONFLICT (topic_id) DO UPDATE SET token = excluded.token, turn = 0, until = excluded.until
    WHERE r.token IS NULL AND r.until <= clock_timestamp()
RETURNING token;

-- name: topic_ready_of
-- The buffers of topics.
SELECT topic_id, token, turn, until > clock_timestamp() AS live FROM queen.topic_ready
WHERE topic_id = ANY ($1::integer[]) AND token IS NOT NULL;

-- name: topic_ready_renew
-- Renew the leases of buffers; returns those that still exist.
UPDATE queen.topic_ready SET until = clock_timestamp() + make_interval(secs => $2)
WHERE topic_id = ANY (ARRAY(SELECT topic_id FROM queen.topic_ready WHERE token = ANY ($1::text[]) ORDER BY 1))
    AND token = ANY ($1::text[])
RETURNING topic_id;

-- name: topic_ready_expired
-- Buffers whose leases expired.
SELECT r.topic_id, r.token, n.name AS namespace, t.name AS topic FROM queen.topic_ready r
LEFT JOIN queen.topics t ON t.id = r.topic_id LEFT JOIN queen.topic_namespaces n ON n.id = t.namespace_id
WHERE r.token IS NOT NULL AND r.until <= clock_timestamp();

-- name: topic_prefetch
-- Lease the first items of a topic that are ready and due for its buffer ($2), so many ($3); those before a place
-- ($4, $5, $6), if it is given. What has more than $7 bytes stays here. The buffer is in turn $8, and will be in $9.
WITH mine AS (
    UPDATE queen.topic_ready SET turn = $9 WHERE topic_id = $1 AND token = $2 AND turn = $8 AND until > clock_timestamp()
    RETURNING topic_id
), picked AS MATERIALIZED (
    SELECT r.id FROM mine m JOIN queen.topic_heads h ON h.topic_id = m.topic_id
    CROSS JOIN LATERAL (
        SELECT i.id, i.deliver_after FROM queen.topic_items i
        WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
            AND i.deliver_after >= h.head AND i.deliver_after <= CASE WHEN h.priority < $4::integer OR $4 IS NULL
                THEN statement_timestamp() ELSE least($5::timestamptz, statement_timestamp()) END
            AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
            AND ($4 IS NULL OR h.priority < $4 OR i.deliver_after < $5 OR i.id < $6::bigint)
        ORDER BY i.deliver_after, i.id LIMIT $3
    ) r
    WHERE $4::integer IS NULL OR h.priority <= $4::integer
    ORDER BY h.priority, r.deliver_after, r.id LIMIT $3
)
UPDATE queen.topic_items i SET leased_until = 'infinity', lease_owner = NULL
WHERE i.id = ANY (ARRAY(SELECT id FROM picked)) AND i.leased_until IS NULL
RETURNING i.id, i.topic_id, i.priority, i.deliver_after, i.retries, i.created_at, i.first_failed_at, i.last_error, i.expires_at, i.idempotency_key, i.is_json,
    octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) AS nbytes,
    CASE WHEN octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) <= $7::integer THEN i.metadata END AS metadata,
    CASE WHEN octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) <= $7::integer THEN i.payload END AS payload;

-- name: topic_hand_out
-- Hand out items ($10) of a buffer ($2): each of $7 leases for $8 seconds so many ($9) of them. Nothing is handed
-- out when the buffer is closed or is not in turn $11 (it will be in $12), nor, if $6, when an item outside of it comes
-- before a place ($3, $4, $5).
WITH mine AS (
    UPDATE queen.topic_ready SET turn = $12 WHERE topic_id = $1 AND token = $2 AND turn = $11 AND until > clock_timestamp()
    RETURNING topic_id
), looked AS MATERIALIZED (
    SELECT $6::boolean AND EXISTS (
        SELECT FROM queen.topic_heads h CROSS JOIN LATERAL (
            SELECT FROM queen.topic_items i
            WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
                -- Not by comparing rows, as that would read on to the last item that is ready.
                AND i.deliver_after >= h.head AND i.deliver_after <= CASE WHEN h.priority < $3::integer
                    THEN statement_timestamp() ELSE least($4::timestamptz, statement_timestamp()) END
                AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
                AND (h.priority < $3::integer OR i.deliver_after < $4::timestamptz OR i.id < $5::bigint)
            ORDER BY i.deliver_after, i.id LIMIT 1
        ) f WHERE h.topic_id = $1 AND h.priority <= $3::integer
    ) AS overtaken
), asked AS (
    SELECT owner, seconds, n, sum(n) OVER (ORDER BY place) AS upto
    FROM unnest($7::text[], $8::float8[], $9::bigint[]) WITH ORDINALITY AS a (owner, seconds, n, place)
), given AS (
    INSERT INTO queen.topic_handouts (owner, topic_id, leased_until, handed_at, ids)
    SELECT a.owner, m.topic_id, clock_timestamp() + make_interval(secs => a.seconds), clock_timestamp(),
        ($10::bigint[])[(a.upto - a.n + 1)::integer:a.upto::integer]
    FROM mine m CROSS JOIN looked l CROSS JOIN asked a WHERE NOT l.overtaken
    RETURNING owner, leased_until, handed_at
)
SELECT l.overtaken, g.owner, g.leased_until, g.handed_at FROM looked l LEFT JOIN given g ON true;

-- name: topic_settle_handouts
-- Write leases to the rows of items: of handouts older than so many seconds ($1) or whose leases have ended, of some topics
-- ($2) or all (null), with some items ($3) or any (null).
WITH old AS MATERIALIZED (
    DELETE FROM queen.topic_handouts
    WHERE ($2::integer[] IS NULL OR topic_id = ANY ($2::integer[])) AND ($3::bigint[] IS NULL OR ids && $3::bigint[])
        AND (handed_at <= clock_timestamp() - make_interval(secs => $1) OR leased_until <= clock_timestamp())
    RETURNING owner, leased_until, handed_at, ids
), leased AS MATERIALIZED (
    -- The order in which items are always locked.
    SELECT o.owner, o.leased_until, o.handed_at, u.id FROM old o CROSS JOIN LATERAL unnest(o.ids) AS u (id) ORDER BY u.id
)
UPDATE queen.topic_items i SET lease_owner = f.owner, leased_until = f.leased_until, updated_at = f.handed_at
FROM (
    -- One by one by their ids: PostgreSQL cannot estimate their number, and would compare each with each.
    SELECT l.owner, l.leased_until, l.handed_at, x.place FROM leased l CROSS JOIN LATERAL (
        SELECT y.ctid AS place FROM queen.topic_items y
        WHERE y.id = l.id AND y.lease_owner IS NULL AND y.leased_until IS NOT DISTINCT FROM 'infinity' FOR UPDATE
    ) x
) f
WHERE i.ctid = f.place;

-- name: topic_ready_close
-- Close a buffer; the topic gets none for so many seconds.
UPDATE queen.topic_ready SET token = NULL, until = clock_timestamp() + make_interval(secs => $3)
WHERE topic_id = $1 AND token = $2 RETURNING topic_id;

-- name: topic_ready_close_any
-- Close the buffer of a topic; it gets none until this transaction ends.
UPDATE queen.topic_ready SET token = NULL, until = clock_timestamp() WHERE topic_id = $1;

-- name: topic_ready_orphans
-- Topics with prefetched items that are in no buffer, and were not handed out.
SELECT DISTINCT i.topic_id FROM queen.topic_items i
WHERE i.leased_until = 'infinity' AND i.lease_owner IS NULL
    AND NOT EXISTS (SELECT FROM queen.topic_ready r WHERE r.topic_id = i.topic_id AND r.token IS NOT NULL)
    AND NOT EXISTS (SELECT FROM queen.topic_handouts h WHERE h.topic_id = i.topic_id);

-- name: topic_ready_free
-- Items prefetched for a closed buffer of a topic, and not handed out, are ready as before.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), doomed AS MATERIALIZED (
    SELECT i.id FROM held CROSS JOIN queen.topic_items i
    WHERE i.leased_until = 'infinity' AND i.topic_id = $2 AND i.lease_owner IS NULL
        AND NOT EXISTS (SELECT FROM queen.topic_ready r WHERE r.topic_id = $2 AND r.token IS NOT NULL)
        AND NOT EXISTS (SELECT FROM queen.topic_handouts h WHERE h.topic_id = $2)
), back AS (
    UPDATE queen.topic_items i SET leased_until = NULL
    WHERE i.id = ANY (ARRAY(SELECT id FROM doomed ORDER BY id)) AND i.leased_until = 'infinity' AND i.lease_owner IS NULL
    RETURNING i.topic_id, i.priority, i.deliver_after
), lowered AS (
    INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
    SELECT topic_id, priority, min(deliver_after) - interval '5 minutes' FROM back
        GROUP BY topic_id, priority ORDER BY topic_id, priority
    ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes'
)
SELECT count(*) AS freed FROM back;

-- name: topic_payloads
-- The payloads of items.
SELECT id, is_json, payload, metadata FROM queen.topic_items WHERE id = ANY ($1::bigint[]);
