-- Topics: priority queues with one row per item.
--
-- A statement that makes an item ready holds a shared advisory lock (class 1366650960) of the topic, and reads the clock
-- only once it has it; one that advances heads holds it exclusively. So no item appears before a head that was advanced.
-- A new head is set five minutes back: concurrent holders of the lock may have read the clock a little earlier, and do
-- not see the row that is being inserted. An existing head is set to the time itself.

-- name: topic_namespaces_by_names
-- Namespaces by their names.
SELECT id, name, quota_per_minute FROM queen.topic_namespaces WHERE name = ANY ($1::text[]);

-- name: topic_quotas
-- Every namespace that has a quota of its own.
SELECT id, name, quota_per_minute FROM queen.topic_namespaces WHERE quota_per_minute IS NOT NULL ORDER BY name;

-- name: topic_set_quota
-- Give a namespace, made if need be, a quota of its own, or (null) none.
INSERT INTO queen.topic_namespaces (name, quota_per_minute) VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE SET quota_per_minute = excluded.quota_per_minute;

-- name: topic_create_namespaces
-- Create namespaces that do not exist yet.
INSERT INTO queen.topic_namespaces (name) SELECT DISTINCT n FROM unnest($1::text[]) AS n ORDER BY n ON CONFLICT DO NOTHING;

-- name: topic_create
-- Create topics that do not exist yet, in namespaces that do.
INSERT INTO queen.topics (namespace_id, name)
SELECT n.id, i.topic FROM unnest($1::text[], $2::text[]) AS i (namespace, topic)
JOIN queen.topic_namespaces n ON n.name = i.namespace
ORDER BY 1, 2 ON CONFLICT DO NOTHING;

-- name: topics_by_names
-- Topics by namespace and name.
SELECT t.*, i.namespace FROM unnest($1::text[], $2::text[]) AS i (namespace, topic)
CROSS JOIN LATERAL (
    SELECT * FROM queen.topics
    WHERE namespace_id = (SELECT id FROM queen.topic_namespaces WHERE name = i.namespace) AND name = i.topic OFFSET 0
) t;

-- name: topic_configure
-- Replace the options of a topic that exists.
UPDATE queen.topics t SET max_retries = $2, backoff_base_ms = $3, backoff_cap_ms = $4, lease_seconds = $5,
    at_most_once = $6, ttl_seconds = $7
FROM queen.topic_namespaces n WHERE t.id = $1 AND n.id = t.namespace_id
RETURNING t.*, n.name AS namespace;

-- name: topic_pause
-- Pause or resume a topic; no row when that changes nothing.
UPDATE queen.topics SET paused = $2 WHERE id = $1 AND paused <> $2 RETURNING id;

-- name: topic_paused_names
-- Topics that are paused.
SELECT n.name AS namespace, t.name FROM queen.topics t JOIN queen.topic_namespaces n ON n.id = t.namespace_id
WHERE t.paused ORDER BY n.name, t.name;

-- name: topic_reserve_ids
-- Reserve a range of time ($2 ms long, not before $1) for ids of one node: the preferred one ($3) when it is free.
UPDATE queen.topic_nodes SET upto_ms = greatest(upto_ms, $1::bigint) + $2::bigint
WHERE node = (
    SELECT node FROM queen.topic_nodes ORDER BY node = $3::integer AND upto_ms <= $1::bigint DESC, upto_ms, node
    LIMIT 1 FOR UPDATE SKIP LOCKED
)
RETURNING node, upto_ms - $2::bigint AS from_ms, upto_ms;

-- name: topic_enqueue
-- Store items whose topics exist and whose keys are new; gives the time of it and the ids that were stored.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at FROM held
), keyed AS (
    INSERT INTO queen.topic_keys (namespace_id, key, item_id, created_at)
    SELECT t.namespace_id, k.key, k.item_id, m.at
    FROM moment m CROSS JOIN unnest($2::integer[], $3::text[], $4::bigint[]) WITH ORDINALITY
        AS k (topic_id, key, item_id, place)
    JOIN queen.topics t ON t.id = k.topic_id
    ORDER BY k.place
    ON CONFLICT DO NOTHING RETURNING item_id
), fresh AS MATERIALIZED (
    SELECT i.*, m.at, coalesce(i.given, m.at + make_interval(secs => coalesce(i.delay, 0))) AS due,
        coalesce(i.own_ttl, t.ttl_seconds) AS ttl
    FROM moment m
    CROSS JOIN unnest($5::bigint[], $6::integer[], $7::integer[], $8::timestamptz[], $9::float8[], $10::float8[],
        $11::text[], $12::boolean[], $13::bytea[], $14::bytea[])
        AS i (id, topic_id, priority, given, delay, own_ttl, key, is_json, metadata, payload)
    JOIN queen.topics t ON t.id = i.topic_id
    WHERE i.key IS NULL OR i.id IN (SELECT item_id FROM keyed)
), firsts AS MATERIALIZED (
    SELECT topic_id, priority, least(min(due), min(at)) AS head, min(at) AS at FROM fresh GROUP BY topic_id, priority
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
        idempotency_key, metadata, payload)
    SELECT id, due, greatest(due, at) + make_interval(secs => ttl), at, at, topic_id, priority, is_json, key, metadata,
        payload
    FROM fresh
    ON CONFLICT DO NOTHING RETURNING id
)
SELECT (SELECT at FROM moment) AS at, (SELECT array_agg(id) FROM stored) AS ids;

-- name: topic_key_owners
-- The items that were enqueued with keys.
SELECT i.place, k.item_id FROM unnest($1::integer[], $2::text[]) WITH ORDINALITY AS i (namespace_id, key, place)
JOIN queen.topic_keys k ON k.namespace_id = i.namespace_id AND k.key = i.key;

-- name: topic_claim
-- Lease the first items that are ready and due: so many ($2) of each topic ($1). The places of a topic begin at
-- $3; the request whose places begin at $4 leases for $5 seconds as $6. If $7, none of topics with a prefetch buffer.
-- No more are leased once they have $8 bytes.
WITH picked AS MATERIALIZED (
    SELECT n.place, width_bucket(n.nth, $4::bigint[]) AS slot
    FROM (
        SELECT p.place,
            a.base + row_number() OVER (PARTITION BY a.topic_id ORDER BY p.priority, p.deliver_after, p.id) - 1 AS nth,
            sum(p.nbytes) OVER (ORDER BY a.topic_id, p.priority, p.deliver_after, p.id ROWS UNBOUNDED PRECEDING)
                - p.nbytes AS before
        FROM unnest($1::integer[], $2::bigint[], $3::bigint[]) AS a (topic_id, wanted, base)
        CROSS JOIN LATERAL (
            SELECT r.place, r.id, r.priority, r.deliver_after, r.nbytes
            FROM queen.topic_heads h
            CROSS JOIN LATERAL (
                SELECT i.ctid AS place, i.id, i.priority, i.deliver_after,
                    octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) + 400 AS nbytes
                FROM queen.topic_items i
                WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
                    AND i.deliver_after >= h.head AND i.deliver_after <= statement_timestamp()
                    AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
                ORDER BY i.deliver_after, i.id LIMIT a.wanted FOR UPDATE SKIP LOCKED
            ) r
            WHERE h.topic_id = a.topic_id ORDER BY h.priority LIMIT a.wanted
        ) p
        WHERE NOT $7::boolean OR (SELECT o.token FROM queen.topic_ready o WHERE o.topic_id = a.topic_id) IS NULL
    ) n
    WHERE n.before < $8
)
UPDATE queen.topic_items i SET
    leased_until = clock_timestamp() + make_interval(secs => ($5::float8[])[p.slot]),
    lease_owner = ($6::text[])[p.slot], updated_at = clock_timestamp()
FROM picked p
-- They are locked, so their places are stable. A join by id would get a plan that depends on table statistics.
WHERE i.ctid = p.place
RETURNING p.slot, i.id, i.topic_id, i.priority, i.deliver_after, i.leased_until, i.lease_owner, i.retries, i.created_at,
    i.updated_at, i.first_failed_at, i.last_error, i.expires_at, i.idempotency_key, i.is_json, i.metadata, i.payload;

-- name: topic_next_due
-- For each topic ($1) the seconds until the first item behind a time ($2) becomes due, below 0 when it is; null when
-- there is none. `at` is the time of this statement.
SELECT t.topic_id, statement_timestamp() AS at, (
    SELECT extract(epoch FROM min(f.deliver_after) - clock_timestamp())::float8
    FROM queen.topic_heads h
    CROSS JOIN LATERAL (
        SELECT i.deliver_after FROM queen.topic_items i
        WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
            AND i.deliver_after >= h.head AND i.deliver_after > t.since
            AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
        ORDER BY i.deliver_after, i.id LIMIT 1
    ) f
    WHERE h.topic_id = t.topic_id
) AS seconds
FROM unnest($1::integer[], $2::timestamptz[]) AS t (topic_id, since);

-- name: topic_give_back
-- End leases of items that were not delivered: they are ready as before.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), back AS (
    UPDATE queen.topic_items i SET leased_until = NULL, lease_owner = NULL
    FROM unnest($2::bigint[], $3::text[]) AS g (id, owner) CROSS JOIN held
    WHERE i.id = g.id AND i.lease_owner = g.owner AND i.leased_until IS NOT NULL
    RETURNING i.topic_id, i.priority, i.deliver_after
)
INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
SELECT topic_id, priority, min(deliver_after) - interval '5 minutes' FROM back
    GROUP BY topic_id, priority ORDER BY topic_id, priority
ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes';

-- name: topic_ack
-- Remove items that were processed. An expired lease still counts until the item is leased again. Ids ascend.
DELETE FROM queen.topic_items i
WHERE i.id = ANY ($1::bigint[]) AND i.topic_id = ($2::integer[])[width_bucket(i.id, $1::bigint[])] AND CASE
    WHEN i.lease_owner IS NOT NULL THEN coalesce(i.lease_owner = ($3::text[])[width_bucket(i.id, $1::bigint[])], true)
    WHEN i.leased_until IS NULL THEN false
    -- Just handed out of a prefetch buffer, or still in it. Not EXISTS, which may read the whole table.
    WHEN ($3::text[])[width_bucket(i.id, $1::bigint[])] IS NOT NULL
        THEN coalesce((SELECT i.id = ANY (h.ids) FROM queen.topic_handouts h
            WHERE h.owner = ($3::text[])[width_bucket(i.id, $1::bigint[])]), false)
    ELSE coalesce((SELECT true FROM queen.topic_handouts h
        WHERE h.topic_id = i.topic_id AND i.id = ANY (h.ids) LIMIT 1), false)
    END
RETURNING width_bucket(i.id, $1::bigint[]) AS slot;

-- name: topic_ack_repeated
-- The same where an item may be named several times, with different owners: the one that holds the lease counts.
DELETE FROM queen.topic_items i
USING unnest($1::bigint[], $2::integer[], $3::text[]) WITH ORDINALITY AS a (id, topic_id, owner, slot)
WHERE i.id = ANY ($1::bigint[]) AND i.id = a.id AND i.topic_id = a.topic_id AND CASE
    WHEN i.lease_owner IS NOT NULL THEN coalesce(i.lease_owner = a.owner, true)
    WHEN i.leased_until IS NULL THEN false
    WHEN a.owner IS NOT NULL
        THEN coalesce((SELECT i.id = ANY (h.ids) FROM queen.topic_handouts h WHERE h.owner = a.owner), false)
    ELSE coalesce((SELECT true FROM queen.topic_handouts h
        WHERE h.topic_id = i.topic_id AND i.id = ANY (h.ids) LIMIT 1), false)
    END
RETURNING a.slot;

-- name: topic_extend
-- Make live leases end so many seconds from now; never earlier than they would.
UPDATE queen.topic_items i
SET leased_until = greatest(i.leased_until, clock_timestamp() + make_interval(secs => e.seconds)),
    updated_at = clock_timestamp()
FROM unnest($1::bigint[], $2::integer[], $3::text[], $4::float8[]) WITH ORDINALITY
    AS e (id, topic_id, owner, seconds, slot)
WHERE i.id = e.id AND i.topic_id = e.topic_id AND i.leased_until > clock_timestamp() AND i.lease_owner IS NOT NULL
    AND (e.owner IS NULL OR e.owner = i.lease_owner)
RETURNING e.slot, i.leased_until, i.lease_owner;

-- name: topic_set_lease
-- Make live leases end so many seconds from now, sooner or later than they would.
UPDATE queen.topic_items i
SET leased_until = clock_timestamp() + make_interval(secs => e.seconds), updated_at = clock_timestamp()
FROM unnest($1::bigint[], $2::integer[], $3::text[], $4::float8[]) WITH ORDINALITY
    AS e (id, topic_id, owner, seconds, slot)
WHERE i.id = e.id AND i.topic_id = e.topic_id AND i.leased_until > clock_timestamp() AND i.lease_owner = e.owner
RETURNING e.slot;

-- name: topic_nack
-- Leased items that failed wait longer each time, and become dead letters when their retries are used up, or at once ($6).
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), failed AS MATERIALIZED (
    SELECT n.slot, i.id, n.error, clock_timestamp() AS at, n.dead OR i.retries >= t.max_retries AS over,
        least(t.backoff_cap_ms, t.backoff_base_ms * power(2::float8, least(i.retries, 40))) * (0.5 + random() / 2)
            AS backoff
    FROM held CROSS JOIN unnest($2::bigint[], $3::integer[], $4::text[], $5::text[], $6::boolean[]) WITH ORDINALITY
        AS n (id, topic_id, owner, error, dead, slot)
    JOIN queen.topic_items i ON i.id = n.id AND i.topic_id = n.topic_id
    JOIN queen.topics t ON t.id = i.topic_id
    WHERE i.lease_owner IS NOT NULL AND (n.owner IS NULL OR n.owner = i.lease_owner)
    FOR UPDATE OF i
), again AS (
    UPDATE queen.topic_items i SET deliver_after = f.at + make_interval(secs => f.backoff / 1000),
        leased_until = NULL, lease_owner = NULL, retries = i.retries + 1, updated_at = f.at, last_error = f.error,
        first_failed_at = coalesce(i.first_failed_at, f.at)
    FROM failed f WHERE i.id = f.id AND NOT f.over
    RETURNING f.slot, i.topic_id, i.priority, f.at, f.backoff
), made AS (
    INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
    SELECT topic_id, priority, min(at) - interval '5 minutes' FROM again
    GROUP BY topic_id, priority ORDER BY topic_id, priority
    ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes'
), dead AS (
    DELETE FROM queen.topic_items i USING failed f WHERE i.id = f.id AND f.over
    RETURNING f.slot, f.at, f.error, i.*
), letters AS (
    INSERT INTO queen.topic_dead_letters (id, topic_id, priority, retries, is_json, deliver_after, created_at,
        first_failed_at, moved_at, idempotency_key, last_error, metadata, payload)
    SELECT id, topic_id, priority, retries, is_json, deliver_after, created_at, coalesce(first_failed_at, at), at,
        idempotency_key, error, metadata, payload FROM dead
)
SELECT slot, false AS dead, backoff / 1000 AS seconds FROM again
UNION ALL SELECT slot, true, 0 FROM dead;

-- name: topic_expired_leases
-- Leases that expired since a time, and the current time.
SELECT statement_timestamp() AS at, max(l.leased_until) AS last, array_agg(l.id) AS ids,
    array_agg(DISTINCT l.topic_id) AS topic_ids
FROM (
    SELECT id, topic_id, leased_until FROM queen.topic_items
    WHERE leased_until > $1::timestamptz AND leased_until <= statement_timestamp() ORDER BY leased_until LIMIT $2
) l;

-- name: topic_expire_leases
-- Items whose leases expired are ready again, or become dead letters when their retries are used up.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), expired AS MATERIALIZED (
    SELECT i.id, clock_timestamp() AS at, i.retries >= t.max_retries AS over
    FROM held CROSS JOIN unnest($2::bigint[]) AS n (id)
    JOIN queen.topic_items i ON i.id = n.id
    JOIN queen.topics t ON t.id = i.topic_id
    WHERE i.leased_until <= statement_timestamp()
    FOR UPDATE OF i SKIP LOCKED
), again AS (
    UPDATE queen.topic_items i SET leased_until = NULL, retries = i.retries + 1, updated_at = l.at, last_error = $3,
        first_failed_at = coalesce(i.first_failed_at, l.at)
    FROM expired l WHERE i.id = l.id AND NOT l.over
    RETURNING i.topic_id, i.priority, i.deliver_after
), lowered AS (
    INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
    SELECT topic_id, priority, min(deliver_after) - interval '5 minutes' FROM again
    GROUP BY topic_id, priority ORDER BY topic_id, priority
    ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes'
), dead AS (
    DELETE FROM queen.topic_items i USING expired l WHERE i.id = l.id AND l.over
    RETURNING l.at, i.*
), letters AS (
    INSERT INTO queen.topic_dead_letters (id, topic_id, priority, retries, is_json, deliver_after, created_at,
        first_failed_at, moved_at, idempotency_key, last_error, metadata, payload)
    SELECT id, topic_id, priority, retries, is_json, deliver_after, created_at, coalesce(first_failed_at, at), at,
        idempotency_key, $3, metadata, payload FROM dead
)
SELECT DISTINCT n.name AS namespace, t.name AS topic
FROM again a JOIN queen.topics t ON t.id = a.topic_id JOIN queen.topic_namespaces n ON n.id = t.namespace_id;

-- name: topic_lock_alone
-- Exclude statements that make items of these topics ready until this transaction ends, after a short wait for them.
SELECT set_config('lock_timeout', '200', true), pg_advisory_xact_lock(1366650960, $1::integer);

-- name: topic_advance_heads
-- Move the first heads of a topic to where its ready items begin; a priority that has not been used for a while needs none.
WITH looked AS MATERIALIZED (
    SELECT h.priority, f.deliver_after, f.deliver_after IS NULL AND h.head < clock_timestamp() - interval '15 minutes'
        AS unused
    FROM (SELECT * FROM queen.topic_heads WHERE topic_id = $1 ORDER BY priority LIMIT $2) h
    LEFT JOIN LATERAL (
        SELECT i.deliver_after FROM queen.topic_items i
        WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
            AND i.deliver_after >= h.head
        ORDER BY i.deliver_after, i.id LIMIT 1
    ) f ON true
), gone AS (
    DELETE FROM queen.topic_heads h USING looked l WHERE h.topic_id = $1 AND h.priority = l.priority AND l.unused
)
UPDATE queen.topic_heads h SET head = least(l.deliver_after, clock_timestamp())
FROM looked l WHERE h.topic_id = $1 AND h.priority = l.priority AND NOT l.unused
    AND least(l.deliver_after, clock_timestamp()) > h.head;

-- name: topic_active
-- The topics of a namespace that have ready or leased items.
SELECT t.name FROM queen.topic_namespaces n JOIN queen.topics t ON t.namespace_id = n.id
WHERE n.name = $1 AND (
    EXISTS (SELECT FROM queen.topic_heads h CROSS JOIN LATERAL (
        SELECT FROM queen.topic_items i WHERE i.topic_id = h.topic_id AND i.priority = h.priority
            AND i.leased_until IS NULL AND i.deliver_after >= h.head LIMIT 1) f WHERE h.topic_id = t.id)
    OR t.id IN (SELECT i.topic_id FROM queen.topic_items i WHERE i.leased_until IS NOT NULL)
)
ORDER BY t.name;

-- name: topic_counts
-- How many items the topics of a namespace, or one of them, have in each state: a page of those with a text ($3) in their
-- names (empty: any), by name.
WITH page AS MATERIALIZED (
    SELECT t.*, n.name AS namespace FROM queen.topic_namespaces n JOIN queen.topics t ON t.namespace_id = n.id
    WHERE n.name = $1 AND ($2::text IS NULL OR t.name = $2) AND ($3::text = '' OR position(lower($3) IN lower(t.name)) > 0)
    ORDER BY t.name LIMIT $4 OFFSET $5
)
SELECT t.*, coalesce(c.ready + c.prefetched, 0) - coalesce(o.handed, 0) AS ready, coalesce(c.delayed, 0) AS delayed,
    coalesce(c.leased - c.prefetched, 0) + coalesce(o.handed, 0) AS leased,
    (SELECT count(*) FROM queen.topic_dead_letters d WHERE d.topic_id = t.id) AS dead
FROM page t
LEFT JOIN (
    SELECT topic_id, count(*) FILTER (WHERE leased_until IS NULL AND deliver_after <= statement_timestamp()) AS ready,
        count(*) FILTER (WHERE leased_until IS NULL AND deliver_after > statement_timestamp()) AS delayed,
        count(*) FILTER (WHERE leased_until IS NOT NULL) AS leased,
        count(*) FILTER (WHERE leased_until = 'infinity' AND lease_owner IS NULL) AS prefetched
    FROM queen.topic_items
    WHERE topic_id IN (SELECT id FROM page)
    GROUP BY topic_id
) c ON c.topic_id = t.id
LEFT JOIN (
    SELECT h.topic_id, count(*) AS handed FROM queen.topic_handouts h CROSS JOIN LATERAL unnest(h.ids) AS u (id)
    JOIN queen.topic_items i ON i.id = u.id AND i.leased_until IS NOT DISTINCT FROM 'infinity' AND i.lease_owner IS NULL
    GROUP BY h.topic_id
) o ON o.topic_id = t.id
ORDER BY t.name;

-- name: topic_priorities
-- How many items of a topic are in each state at each priority, as in topic_counts, in the order of service.
SELECT s.priority, count(*) FILTER (WHERE s.waits AND s.deliver_after <= statement_timestamp()) AS ready,
    count(*) FILTER (WHERE s.waits AND s.deliver_after > statement_timestamp()) AS delayed,
    count(*) FILTER (WHERE NOT s.waits) AS leased
FROM (
    SELECT i.priority, i.deliver_after, i.leased_until IS NULL OR i.leased_until = 'infinity' AND i.lease_owner IS NULL
        AND NOT EXISTS (SELECT FROM queen.topic_handouts o WHERE o.topic_id = $1 AND i.id = ANY (o.ids)) AS waits
    FROM queen.topic_items i WHERE i.topic_id = $1
) s
GROUP BY s.priority ORDER BY s.priority LIMIT $2;

-- name: topic_peek
-- The items of a topic that are ready, due or not, in the order of service, after so many; those in its ready queue among
-- them. There are no more once they have $5 bytes.
SELECT s.*, NULL::timestamptz AS leased_until, NULL::text AS lease_owner FROM (
    SELECT p.*, sum(octet_length(payload) + coalesce(octet_length(metadata), 0)) OVER (ORDER BY priority, deliver_after, id ROWS UNBOUNDED PRECEDING)
            - octet_length(payload) - coalesce(octet_length(metadata), 0) AS before
    FROM (SELECT * FROM (
        (SELECT r.* FROM queen.topic_heads h CROSS JOIN LATERAL (
            SELECT i.id, i.priority, i.deliver_after, i.expires_at, i.created_at, i.updated_at, i.first_failed_at, i.retries,
                i.is_json, i.idempotency_key, i.last_error, i.metadata, i.payload
            FROM queen.topic_items i
            WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
                AND i.deliver_after >= h.head AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
                AND ($3 OR i.deliver_after <= statement_timestamp())
            ORDER BY i.deliver_after, i.id LIMIT $2::bigint + $4::bigint
        ) r
        WHERE h.topic_id = $1 ORDER BY h.priority LIMIT $2::bigint + $4::bigint)
        UNION ALL
        SELECT i.id, i.priority, i.deliver_after, i.expires_at, i.created_at, i.updated_at, i.first_failed_at, i.retries,
            i.is_json, i.idempotency_key, i.last_error, i.metadata, i.payload
        FROM queen.topic_items i
        WHERE i.leased_until = 'infinity' AND i.lease_owner IS NULL AND i.topic_id = $1
            AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
            AND NOT EXISTS (SELECT FROM queen.topic_handouts o WHERE o.topic_id = $1 AND i.id = ANY (o.ids))
    ) i ORDER BY i.priority, i.deliver_after, i.id OFFSET $4) p
) s
WHERE s.before < $5::bigint ORDER BY s.priority, s.deliver_after, s.id LIMIT $2;

-- name: topic_peek_leased
-- The items of a topic that are leased, the lease that ends first first, after so many; no more once they have $4 bytes.
SELECT * FROM (
    SELECT i.*, sum(octet_length(payload) + coalesce(octet_length(metadata), 0)) OVER (ORDER BY leased_until, id ROWS UNBOUNDED PRECEDING)
            - octet_length(payload) - coalesce(octet_length(metadata), 0) AS before
    FROM (
        SELECT id, priority, deliver_after, expires_at, created_at, updated_at, first_failed_at, retries, is_json,
            idempotency_key, last_error, metadata, payload, leased_until, lease_owner
        FROM queen.topic_items
        WHERE leased_until > statement_timestamp() AND lease_owner IS NOT NULL AND topic_id = $1
        ORDER BY leased_until, id LIMIT $2 OFFSET $3
    ) i
) s
WHERE before < $4::bigint ORDER BY leased_until, id;

-- name: topic_dead_letters
-- The dead letters of a topic, oldest first, after so many; no more once they have $4 bytes.
SELECT * FROM (
    SELECT d.*, sum(octet_length(payload) + coalesce(octet_length(metadata), 0)) OVER (ORDER BY moved_at, id ROWS UNBOUNDED PRECEDING)
            - octet_length(payload) - coalesce(octet_length(metadata), 0) AS before
    FROM (
        SELECT * FROM queen.topic_dead_letters WHERE topic_id = $1 ORDER BY moved_at, id LIMIT $2 OFFSET $3
    ) d
) s
WHERE before < $4::bigint ORDER BY moved_at, id;

-- name: topic_delete_dead_letters
-- Delete dead letters.
DELETE FROM queen.topic_dead_letters d USING unnest($1::bigint[], $2::integer[]) WITH ORDINALITY AS i (id, topic_id, slot)
WHERE d.id = i.id AND d.topic_id = i.topic_id RETURNING i.slot;

-- name: topic_retry_dead_letters
-- Make dead letters items again: ready now, as if they had never failed.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at FROM held
), taken AS (
    DELETE FROM queen.topic_dead_letters d
    USING moment m, unnest($2::bigint[], $3::integer[]) WITH ORDINALITY AS r (id, topic_id, slot)
    WHERE d.id = r.id AND d.topic_id = r.topic_id RETURNING r.slot, m.at, d.*
), made AS (
    INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
    SELECT topic_id, priority, min(at) - interval '5 minutes' FROM taken
    GROUP BY topic_id, priority ORDER BY topic_id, priority
    ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes'
), stored AS (
    INSERT INTO queen.topic_items (id, deliver_after, expires_at, created_at, updated_at, topic_id, priority, is_json,
        idempotency_key, metadata, payload)
    SELECT t.id, t.at, t.at + make_interval(secs => o.ttl_seconds), t.created_at, t.at, t.topic_id, t.priority,
        t.is_json, t.idempotency_key, t.metadata, t.payload
    FROM taken t JOIN queen.topics o ON o.id = t.topic_id
)
SELECT slot FROM taken;

-- name: topic_remove_items
-- Remove some items of a topic, whatever their state, with their keys; gives how many.
WITH doomed AS MATERIALIZED (
    SELECT id FROM queen.topic_items WHERE topic_id = $1 AND leased_until IS NULL
    ORDER BY topic_id, priority, deliver_after, id LIMIT $2
), removed AS (
    DELETE FROM queen.topic_items WHERE id = ANY (ARRAY(SELECT id FROM doomed)) RETURNING id, topic_id, idempotency_key
), forgotten AS (
    DELETE FROM queen.topic_keys k USING removed r JOIN queen.topics t ON t.id = r.topic_id
    WHERE k.namespace_id = t.namespace_id AND k.key = r.idempotency_key
)
SELECT id FROM removed;

-- name: topic_remove_leased_items
-- The same for items that are leased, which no index lists by topic.
WITH doomed AS MATERIALIZED (
    SELECT id FROM queen.topic_items WHERE topic_id = $1 AND leased_until IS NOT NULL LIMIT $2
), removed AS (
    DELETE FROM queen.topic_items WHERE id = ANY (ARRAY(SELECT id FROM doomed)) RETURNING id, topic_id, idempotency_key
), forgotten AS (
    DELETE FROM queen.topic_keys k USING removed r JOIN queen.topics t ON t.id = r.topic_id
    WHERE k.namespace_id = t.namespace_id AND k.key = r.idempotency_key
)
SELECT id FROM removed;

-- name: topic_drop
-- Delete a topic; its items follow in steps.
WITH gone AS (
    DELETE FROM queen.topics WHERE id = $1 RETURNING id
), heads AS (
    DELETE FROM queen.topic_heads WHERE topic_id = $1
), letters AS (
    DELETE FROM queen.topic_dead_letters WHERE topic_id = $1
), ready AS (
    DELETE FROM queen.topic_ready WHERE topic_id = $1
)
INSERT INTO queen.dropped_topics (topic_id) SELECT id FROM gone ON CONFLICT DO NOTHING RETURNING topic_id;

-- name: topic_hold_namespace
-- Exclude other reservations of this namespace's quota until this transaction ends.
SELECT id FROM queen.topic_namespaces WHERE id = $1 FOR NO KEY UPDATE;

-- name: topic_reserve_quota
-- Reserve up to so many ($3) enqueues, but no fewer than $2, of a namespace's quota ($4) in the last minute. Gives how
-- many it may (0: too few are left), and in how many seconds the least would be free.
WITH own AS MATERIALIZED (
    SELECT $1::integer AS id, floor(extract(epoch FROM clock_timestamp()))::bigint AS second
), used AS MATERIALIZED (
    SELECT coalesce(sum(u.used), 0) AS total FROM own o JOIN queen.topic_usage u
        ON u.namespace_id = o.id AND u.second > o.second - 60
), granted AS MATERIALIZED (
    SELECT CASE WHEN $4::bigint - u.total >= $2::bigint THEN least($3::bigint, $4::bigint - u.total) ELSE 0 END AS n
    FROM used u
), noted AS (
    INSERT INTO queen.topic_usage AS u (namespace_id, second, used)
    SELECT o.id, o.second, g.n FROM own o, granted g WHERE g.n > 0
    ON CONFLICT (namespace_id, second) DO UPDATE SET used = u.used + excluded.used
)
SELECT g.n AS granted, coalesce((
    SELECT min(f.second) + 60 - o.second FROM (
        SELECT u.second, sum(u.used) OVER (ORDER BY u.second) AS freed
        FROM queen.topic_usage u WHERE u.namespace_id = o.id AND u.second > o.second - 60
    ) f WHERE f.freed >= $2::bigint - ($4::bigint - s.total)
), 60) AS wait
FROM own o, granted g, used s;

-- name: topic_expire_items
-- Remove some items that waited longer than they may; gives how many.
WITH doomed AS MATERIALIZED (
    SELECT id FROM queen.topic_items WHERE expires_at <= statement_timestamp() AND leased_until IS NULL
    ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
)
DELETE FROM queen.topic_items WHERE id = ANY (ARRAY(SELECT id FROM doomed)) RETURNING id;

-- name: topic_forget_keys
-- Forget some keys that are older than so many seconds, after a time, and whose items are gone.
WITH old AS MATERIALIZED (
    SELECT namespace_id, key, item_id, created_at FROM queen.topic_keys
    WHERE created_at < statement_timestamp() - make_interval(secs => $1) AND created_at >= $2
    ORDER BY created_at LIMIT $3
), gone AS (
    DELETE FROM queen.topic_keys k USING old o
    WHERE k.namespace_id = o.namespace_id AND k.key = o.key AND k.item_id = o.item_id
        AND NOT EXISTS (SELECT FROM queen.topic_items i WHERE i.id = o.item_id)
        AND NOT EXISTS (SELECT FROM queen.topic_dead_letters d WHERE d.id = o.item_id)
)
SELECT count(*) AS looked_at, max(created_at) AS last FROM old;

-- name: topic_forget_usage
-- Forget what was enqueued before the last minutes.
DELETE FROM queen.topic_usage WHERE second < floor(extract(epoch FROM clock_timestamp()))::bigint - 120;

-- name: topic_dropped
-- Deleted topics, and whether that was so long ago that no enqueue to them can be running.
SELECT topic_id, dropped_at < statement_timestamp() - interval '5 minutes' AS settled FROM queen.dropped_topics;

-- name: topic_forget_dropped
-- Nothing is left of a deleted topic.
WITH heads AS (
    DELETE FROM queen.topic_heads WHERE topic_id = $1
), letters AS (
    DELETE FROM queen.topic_dead_letters WHERE topic_id = $1
)
DELETE FROM queen.dropped_topics WHERE topic_id = $1;

-- name: topic_namespace_list
-- Namespaces with their quotas, what was counted against them in the last minute, and the number of their topics here.
SELECT n.name, n.quota_per_minute, (SELECT count(*) FROM queen.topics t WHERE t.namespace_id = n.id) AS topics,
    coalesce((SELECT sum(u.used) FROM queen.topic_usage u WHERE u.namespace_id = n.id
        AND u.second > floor(extract(epoch FROM statement_timestamp()))::bigint - 60), 0)::bigint AS used
FROM queen.topic_namespaces n;
