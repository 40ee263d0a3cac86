-- Topics: dequeueing from several topics as if they were one.

-- name: topic_due
-- The topics of a namespace ($2: only these) that have ready items, and in how many seconds the first of them is due.
SELECT t.name, extract(epoch FROM f.first - clock_timestamp())::float8 AS seconds
FROM queen.topic_namespaces n
JOIN queen.topics t ON t.namespace_id = n.id AND ($2::text[] IS NULL OR t.name = ANY ($2))
CROSS JOIN LATERAL (
    SELECT min(i.deliver_after) AS first FROM queen.topic_heads h CROSS JOIN LATERAL (
        SELECT r.deliver_after FROM queen.topic_items r
        WHERE r.topic_id = h.topic_id AND r.priority = h.priority AND r.leased_until IS NULL
            AND r.deliver_after >= h.head
        ORDER BY r.deliver_after, r.id LIMIT 1
    ) i WHERE h.topic_id = t.id
) f
WHERE n.name = $1 AND f.first IS NOT NULL;

-- name: topic_claim_many
-- Lease the first items ($2 of them) that are ready and due in any of these topics ($1). The first items of topics say
-- which of them can have any of those. The request whose places begin at $3 leases for $4 seconds (null: the topic's) as $5.
-- No more are leased once they have $6 bytes. Also returns how many were found, as others may have leased some of them
-- meanwhile, and by what time they had to be due.
WITH firsts AS MATERIALIZED (
    SELECT a.topic_id, f.priority, f.deliver_after, f.id
    FROM unnest($1::integer[]) AS a (topic_id)
    CROSS JOIN LATERAL (
        SELECT r.priority, r.deliver_after, r.id
        FROM queen.topic_heads h CROSS JOIN LATERAL (
            SELECT i.id, i.priority, i.deliver_after FROM queen.topic_items i
            WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
                AND i.deliver_after >= h.head AND i.deliver_after <= statement_timestamp()
                AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
            ORDER BY i.deliver_after, i.id LIMIT 1
        ) r
        WHERE h.topic_id = a.topic_id ORDER BY h.priority LIMIT 1
    ) f
    ORDER BY f.priority, f.deliver_after, f.id LIMIT $2
), seen AS MATERIALIZED (
    SELECT p.id, p.priority, p.deliver_after FROM firsts a CROSS JOIN LATERAL (
        SELECT r.id, r.priority, r.deliver_after
        FROM queen.topic_heads h CROSS JOIN LATERAL (
            SELECT i.id, i.priority, i.deliver_after FROM queen.topic_items i
            WHERE i.topic_id = h.topic_id AND i.priority = h.priority AND i.leased_until IS NULL
                AND i.deliver_after >= h.head AND i.deliver_after <= statement_timestamp()
                AND (i.expires_at IS NULL OR i.expires_at > statement_timestamp())
            ORDER BY i.deliver_after, i.id LIMIT $2
        ) r
        WHERE h.topic_id = a.topic_id ORDER BY h.priority LIMIT $2
    ) p
    ORDER BY p.priority, p.deliver_after, p.id LIMIT $2
), locked AS MATERIALIZED (
    -- Only what will be leased is locked: SKIP LOCKED passes over every locked item.
    SELECT i.ctid AS place, i.id, i.priority, i.deliver_after,
        octet_length(i.payload) + coalesce(octet_length(i.metadata), 0) + 400 AS nbytes
    FROM queen.topic_items i
    WHERE i.id = ANY (ARRAY(SELECT id FROM seen)) AND i.leased_until IS NULL
    FOR UPDATE SKIP LOCKED
), picked AS MATERIALIZED (
    SELECT n.place, width_bucket(n.nth, $3::bigint[]) AS slot
    FROM (
        SELECT place, row_number() OVER w - 1 AS nth, sum(nbytes) OVER w - nbytes AS before
        FROM locked WINDOW w AS (ORDER BY priority, deliver_after, id ROWS UNBOUNDED PRECEDING)
    ) n
    WHERE n.before < $6
), leased AS (
    UPDATE queen.topic_items i SET
        leased_until = clock_timestamp() + make_interval(secs => coalesce(($4::float8[])[p.slot], t.lease_seconds)),
        lease_owner = ($5::text[])[p.slot], updated_at = clock_timestamp()
    FROM picked p, queen.topics t
    WHERE i.ctid = p.place AND t.id = i.topic_id
    RETURNING p.slot, i.id, i.topic_id, i.priority, i.deliver_after, i.leased_until, i.lease_owner, i.retries,
        i.created_at, i.updated_at, i.first_failed_at, i.last_error, i.expires_at, i.idempotency_key, i.is_json,
        i.metadata, i.payload
)
SELECT (SELECT count(*) FROM seen) AS seen, statement_timestamp() AS at, l.* FROM (VALUES (1)) AS one LEFT JOIN leased l ON true;
