-- Consumer groups: where they are, moving them, forgetting them.
-- A group knows a partition when it has a cursor there, or when a subscription of its covers it.

-- name: all_groups
-- Every consumer group.
SELECT id, name FROM queen.groups;

-- name: unmet_news
-- Partitions that a subscription of a group covers, where it has no cursor yet although messages came since.
SELECT group_id, since, id, floor_offset, next_offset
FROM (
    SELECT DISTINCT ON (s.group_id, p.id) s.group_id, s.since, p.id, p.floor_offset, p.next_offset, p.last_at
    FROM queen.subscriptions s
    JOIN queen.queues q ON q.name = s.queue_name
    JOIN queen.partitions p ON p.queue_id = q.id AND s.partition_name IN ('', p.name)
    WHERE s.group_id = ANY($1::integer[])
        AND NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = s.group_id)
    ORDER BY s.group_id, p.id, s.partition_name DESC
) u
WHERE last_at > since;

-- name: group_list
-- Positions of groups, summed up by queue. $2-$4: where they start on partitions with messages but without a cursor;
-- on others that they have not met they are at the end. `places` is a hash of where they are behind.
WITH known AS (
    SELECT c.group_id, p.queue_id, p.id, p.next_offset, greatest(c.committed, p.floor_offset) AS position,
        c.total_consumed, c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp() AS leased
    FROM queen.cursors c JOIN queen.partitions p ON p.id = c.partition_id
    WHERE c.group_id = ANY($1::integer[])
    UNION ALL
    SELECT u.group_id, u.queue_id, u.id, u.next_offset, u.next_offset, 0, false
    FROM (
        SELECT DISTINCT ON (s.group_id, p.id) s.group_id, p.queue_id, p.id, p.next_offset, p.last_at > s.since AS news
        FROM queen.subscriptions s
        JOIN queen.queues q ON q.name = s.queue_name
        JOIN queen.partitions p ON p.queue_id = q.id AND s.partition_name IN ('', p.name)
        WHERE s.group_id = ANY($1::integer[])
            AND NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = s.group_id)
        ORDER BY s.group_id, p.id, s.partition_name DESC
    ) u
    WHERE u.news IS NOT TRUE
    UNION ALL
    SELECT n.group_id, p.queue_id, p.id, p.next_offset, greatest(n.start, p.floor_offset), 0, false
    FROM unnest($2::integer[], $3::bigint[], $4::bigint[]) AS n (group_id, partition_id, start)
    JOIN queen.partitions p ON p.id = n.partition_id
), summed AS (
    SELECT k.group_id, k.queue_id, count(*) AS members, count(*) FILTER (WHERE k.next_offset > k.position) AS lagging,
        sum(k.next_offset - k.position)::bigint AS behind, sum(k.total_consumed)::bigint AS consumed,
        count(*) FILTER (WHERE k.leased) AS leases,
        bit_xor(hashint8extended(k.position, k.id)) FILTER (WHERE k.next_offset > k.position) AS places
    FROM known k GROUP BY k.group_id, k.queue_id
)
SELECT k.group_id, k.queue_id, g.name AS group_name, q.name AS queue_name, k.members, k.lagging, k.behind, k.consumed,
    k.leases, k.places, statement_timestamp() AS at, s.mode, s.since, s.created_at AS subscribed_at,
    g.name = ANY (q.paused_groups) AS paused, q.paused AS queue_paused, q.namespace, q.task
FROM summed k
JOIN queen.groups g ON g.id = k.group_id
JOIN queen.queues q ON q.id = k.queue_id
LEFT JOIN LATERAL (
    SELECT mode, since, created_at FROM queen.subscriptions
    WHERE group_id = k.group_id AND queue_name = q.name ORDER BY partition_name LIMIT 1
) s ON true
ORDER BY g.name, q.name;

-- name: oldest_unconsumed
-- When the oldest message was stored that groups ($1) have before them on queues ($2), pair by pair, with $3-$5 saying
-- where they are to start on partitions they have not met; and `places` as above.
SELECT k.group_id, k.queue_id, bit_xor(hashint8extended(k.position, k.id)) AS places, min(o.created_at) AS oldest
FROM (
    SELECT c.group_id, p.queue_id, p.id, p.next_offset, greatest(c.committed, p.floor_offset) AS position
    FROM unnest($1::integer[], $2::integer[]) AS w (group_id, queue_id)
    JOIN queen.partitions p ON p.queue_id = w.queue_id
    JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = w.group_id
    UNION ALL
    SELECT n.group_id, p.queue_id, p.id, p.next_offset, greatest(n.start, p.floor_offset)
    FROM unnest($3::integer[], $4::bigint[], $5::bigint[]) AS n (group_id, partition_id, start)
    JOIN queen.partitions p ON p.id = n.partition_id
    WHERE (n.group_id, p.queue_id) IN (SELECT * FROM unnest($1::integer[], $2::integer[]))
) k
CROSS JOIN LATERAL (
    SELECT g.created_at FROM queen.segments g
    WHERE g.partition_id = k.id AND g.base_offset <= k.position ORDER BY g.base_offset DESC LIMIT 1
) o
WHERE k.next_offset > k.position
GROUP BY k.group_id, k.queue_id;

-- name: group_positions
-- Where groups are on each partition, with $2-$4 as above: all of it by name, or ($5) those more than some seconds
-- behind, the furthest first.
WITH known AS (
    SELECT c.group_id, p.queue_id, p.id, p.name, p.next_offset, greatest(c.committed, p.floor_offset) AS position,
        c.total_consumed, c.last_consumed_at, c.lease_id,
        c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp() AS leased
    FROM queen.cursors c JOIN queen.partitions p ON p.id = c.partition_id
    WHERE c.group_id = ANY($1::integer[])
    UNION ALL
    SELECT u.group_id, u.queue_id, u.id, u.name, u.next_offset, u.next_offset, 0, NULL, NULL, false
    FROM (
        SELECT DISTINCT ON (s.group_id, p.id) s.group_id, p.queue_id, p.id, p.name, p.next_offset,
            p.last_at > s.since AS news
        FROM queen.subscriptions s
        JOIN queen.queues q ON q.name = s.queue_name
        JOIN queen.partitions p ON p.queue_id = q.id AND s.partition_name IN ('', p.name)
        WHERE s.group_id = ANY($1::integer[])
            AND NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = s.group_id)
        ORDER BY s.group_id, p.id, s.partition_name DESC
    ) u
    WHERE u.news IS NOT TRUE
    UNION ALL
    SELECT n.group_id, p.queue_id, p.id, p.name, p.next_offset, greatest(n.start, p.floor_offset), 0, NULL, NULL, false
    FROM unnest($2::integer[], $3::bigint[], $4::bigint[]) AS n (group_id, partition_id, start)
    JOIN queen.partitions p ON p.id = n.partition_id
), placed AS (
    SELECT k.*, o.created_at AS oldest,
        greatest(0, extract(epoch FROM statement_timestamp() - o.created_at))::float8 AS seconds
    FROM known k
    LEFT JOIN LATERAL (
        SELECT g.created_at FROM queen.segments g
        WHERE g.partition_id = k.id AND g.base_offset <= k.position ORDER BY g.base_offset DESC LIMIT 1
    ) o ON k.next_offset > k.position
)
SELECT g.name AS group_name, q.name AS queue_name, k.name AS partition_name, k.id AS partition_id,
    k.lease_id::text AS lease_id, k.leased, k.total_consumed, k.last_consumed_at,
    k.next_offset - k.position AS behind, k.oldest, k.seconds
FROM placed k
JOIN queen.groups g ON g.id = k.group_id
JOIN queen.queues q ON q.id = k.queue_id
WHERE $5::float8 IS NULL OR (k.next_offset > k.position AND k.seconds > $5)
ORDER BY CASE WHEN $5 IS NOT NULL THEN k.seconds END DESC, g.name, q.name, k.name
LIMIT $6 OFFSET $7;

-- name: group_partition_page
-- A page of the partitions of a queue ($2) that a group ($1) knows, with a text ($3) in their names (empty: any), by name,
-- messages behind, messages consumed or the time of the last ($4; $5: descending). By name the index has them in order;
-- each branch but one is empty. What the group has not met counts as behind as far as anything came since. Subscriptions
-- are joined, not looked up row by row: of half a million partitions all are ranked in one pass.
SELECT id FROM (
    (SELECT p.id, 0::float8 AS rank, '' AS name FROM queen.partitions p
    WHERE p.queue_id = $2 AND $4::text = 'name' AND NOT $5::boolean
        AND ($3::text = '' OR position(lower($3) IN lower(p.name)) > 0)
        AND coalesce((SELECT true FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = $1),
            EXISTS (SELECT FROM queen.subscriptions s WHERE s.group_id = $1 AND s.queue_name = $8
                AND s.partition_name IN ('', p.name)))
    ORDER BY p.name LIMIT $6 OFFSET $7)
    UNION ALL
    (SELECT p.id, 0::float8, '' FROM queen.partitions p
    WHERE p.queue_id = $2 AND $4 = 'name' AND $5
        AND ($3 = '' OR position(lower($3) IN lower(p.name)) > 0)
        AND coalesce((SELECT true FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = $1),
            EXISTS (SELECT FROM queen.subscriptions s WHERE s.group_id = $1 AND s.queue_name = $8
                AND s.partition_name IN ('', p.name)))
    ORDER BY p.name DESC LIMIT $6 OFFSET $7)
    UNION ALL
    (SELECT p.id, (CASE $4
            WHEN 'behind' THEN CASE WHEN c.group_id IS NOT NULL THEN p.next_offset - greatest(c.committed, p.floor_offset)
                WHEN p.last_at > coalesce(s.since, e.since) THEN p.next_offset - p.floor_offset ELSE 0 END
            WHEN 'consumed' THEN coalesce(c.total_consumed, 0)
            ELSE coalesce(extract(epoch FROM c.last_consumed_at), 0) END)::float8 * CASE WHEN $5 THEN -1 ELSE 1 END,
        p.name
    FROM queen.partitions p
    LEFT JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = $1
    LEFT JOIN queen.subscriptions s ON s.group_id = $1 AND s.queue_name = $8 AND s.partition_name = p.name
    LEFT JOIN queen.subscriptions e ON e.group_id = $1 AND e.queue_name = $8 AND e.partition_name = ''
    WHERE p.queue_id = $2 AND $4 <> 'name' AND (c.group_id IS NOT NULL OR coalesce(s.since, e.since) IS NOT NULL)
        AND ($3 = '' OR position(lower($3) IN lower(p.name)) > 0)
    ORDER BY 2, 3 LIMIT $6 OFFSET $7)
) f;

-- name: count_group_partitions
-- How many partitions of a queue ($2, of the name $4) a group ($1) knows, with a text ($3) in their names (empty: any);
-- counted up to $5 (null: all).
SELECT count(*) AS found
FROM (
    SELECT FROM queen.partitions p
    WHERE p.queue_id = $2 AND ($3::text = '' OR position(lower($3) IN lower(p.name)) > 0)
        AND coalesce((SELECT true FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = $1),
            EXISTS (SELECT FROM queen.subscriptions s
                WHERE s.group_id = $1 AND s.queue_name = $4 AND s.partition_name IN ('', p.name)))
    LIMIT $5
) p;

-- name: group_places
-- Where a group ($1) is on partitions ($2) of a queue of a name ($3), in the order given; where it has no cursor,
-- `since` is when its subscription begins.
SELECT p.id, p.name, p.floor_offset, p.next_offset,
    CASE WHEN c.group_id IS NOT NULL THEN greatest(c.committed, p.floor_offset) END AS position,
    c.lease_id::text AS lease_id, c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp() AS leased,
    coalesce(c.total_consumed, 0) AS total_consumed, c.last_consumed_at, s.since, statement_timestamp() AS at
FROM unnest($2::bigint[]) WITH ORDINALITY AS i (id, slot)
JOIN queen.partitions p ON p.id = i.id
LEFT JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = $1
LEFT JOIN LATERAL (
    SELECT since FROM queen.subscriptions WHERE group_id = $1 AND queue_name = $3 AND partition_name IN ('', p.name)
    ORDER BY partition_name DESC LIMIT 1
) s ON c.group_id IS NULL
ORDER BY i.slot;

-- name: stored_times
-- When the messages at offsets ($2) of partitions ($1) were stored.
SELECT i.partition_id, s.created_at
FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, message_offset)
CROSS JOIN LATERAL (
    SELECT g.created_at FROM queen.segments g
    WHERE g.partition_id = i.partition_id AND g.base_offset <= i.message_offset ORDER BY g.base_offset DESC LIMIT 1
) s;

-- name: live_lease
-- The live lease that a group has on a partition.
SELECT lease_id::text AS lease_id FROM queen.cursors
WHERE partition_id = $1 AND group_id = $2 AND lease_id IS NOT NULL AND lease_until > clock_timestamp();

-- name: forget_cursors
-- Remove the cursors of a group, on one queue or on all.
WITH doomed AS MATERIALIZED (
    SELECT c.partition_id FROM queen.cursors c
    WHERE c.group_id = $1 AND ($2::text IS NULL OR c.partition_id IN (
        SELECT p.id FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $2
    ))
    ORDER BY c.partition_id FOR UPDATE
), removed AS (
    DELETE FROM queen.cursors c USING doomed d
    WHERE c.partition_id = d.partition_id AND c.group_id = $1 RETURNING 1
)
SELECT count(*) AS partitions FROM removed;

-- name: forget_subscriptions
-- Remove the subscriptions of a group, to one queue or to all.
DELETE FROM queen.subscriptions WHERE group_id = $1 AND ($2::text IS NULL OR queue_name = $2) RETURNING queue_name;

-- name: forget_group
-- Remove a group that has nothing any more: neither cursors nor subscriptions nor dead letters.
DELETE FROM queen.groups g
WHERE g.id = $1 AND NOT EXISTS (SELECT FROM queen.cursors WHERE group_id = g.id)
    AND NOT EXISTS (SELECT FROM queen.subscriptions WHERE group_id = g.id)
    AND NOT EXISTS (SELECT FROM queen.dead_letters WHERE group_id = g.id)
RETURNING g.name;

-- name: move_subscriptions
-- Have a group start at another time on partitions it has not met yet.
UPDATE queen.subscriptions SET since = $2 WHERE group_id = $1 RETURNING queue_name;
