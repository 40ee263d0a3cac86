-- Topics: leases that their holders end early.

-- name: topic_release
-- End live leases whose holders will not do the work: the items are ready as before, and have not failed.
WITH held AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared(1366650960, k)) AS locks FROM unnest($1::integer[]) AS k
), back AS (
    UPDATE queen.topic_items i SET leased_until = NULL, lease_owner = NULL, updated_at = clock_timestamp()
    FROM unnest($2::bigint[], $3::integer[], $4::text[]) WITH ORDINALITY AS r (id, topic_id, owner, slot)
    CROSS JOIN held
    WHERE i.id = r.id AND i.topic_id = r.topic_id AND i.leased_until IS NOT NULL AND i.lease_owner IS NOT NULL
        AND (r.owner IS NULL OR r.owner = i.lease_owner)
    RETURNING r.slot, i.topic_id, i.priority, i.deliver_after
), lowered AS (
    INSERT INTO queen.topic_heads AS h (topic_id, priority, head)
    SELECT topic_id, priority, min(deliver_after) - interval '5 minutes' FROM back
    GROUP BY topic_id, priority ORDER BY topic_id, priority
    ON CONFLICT (topic_id, priority) DO UPDATE SET head = excluded.head + interval '5 minutes'
        WHERE h.head > excluded.head + interval '5 minutes'
)
SELECT slot FROM back;
