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
        c.total_consumed > 0 AS consumed
    FROM queen.cursors c JOIN queen.partitions p ON p.id = c.partition_id
    WHERE c.group_id = ANY($1::integer[])
    UNION ALL
    SELECT u.group_id, u.queue_id, u.id, u.next_offset, u.next_offset, false
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
    SELECT n.group_id, p.queue_id, p.id, p.next_offset, greatest(n.start, p.floor_offset), false
    FROM unnest($2::integer[], $3::bigint[], $4::bigint[]) AS n (group_id, partition_id, start)
    JOIN queen.partitions p ON p.id = n.partition_id
), summed AS (
    SELECT k.group_id, k.queue_id, count(*) AS members, count(*) FILTER (WHERE k.next_offset > k.position) AS lagging,
        sum(k.next_offset - k.position)::bigint AS behind, bool_or(k.consumed) AS consumed,
        bit_xor(hashint8extended(k.position, k.id)) FILTER (WHERE k.next_offset > k.position) AS places
    FROM known k GROUP BY k.group_id, k.queue_id
)
SELECT k.group_id, k.queue_id, g.name AS group_name, q.name AS queue_name, k.members, k.lagging, k.behind, k.consumed,
    k.places, statement_timestamp() AS at, s.mode, s.since, s.created_at AS subscribed_at,
    g.name = ANY (q.paused_groups) AS paused, q.paused AS queue_paused
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

-- name: seek_positions
-- Where a group is on the partitions of a queue (or on one, $3) that it knows, with $4-$6 saying where it is to start on
-- those with news that it has not met; and what they hold.
SELECT p.id, p.name, p.floor_offset, p.next_offset, k.position, k.leased
FROM queen.partitions p
CROSS JOIN LATERAL (
    SELECT least(greatest(c.committed, p.floor_offset), p.next_offset) AS position,
        c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp() AS leased
    FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = $1
    UNION ALL
    SELECT coalesce((SELECT greatest(n.start, p.floor_offset) FROM unnest($4::integer[], $5::bigint[], $6::bigint[])
        AS n (group_id, partition_id, start) WHERE n.partition_id = p.id), p.next_offset), false
    WHERE NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = $1)
        AND EXISTS (SELECT FROM queen.subscriptions s JOIN queen.queues q ON q.name = s.queue_name
            WHERE s.group_id = $1 AND q.id = p.queue_id AND s.partition_name IN ('', p.name))
) k
WHERE p.queue_id = $2 AND ($3::text IS NULL OR p.name = $3)
ORDER BY p.id;

-- name: live_lease
-- The live lease that a group has on a partition.
SELECT lease_id::text AS lease_id FROM queen.cursors
WHERE partition_id = $1 AND group_id = $2 AND lease_id IS NOT NULL AND lease_until > clock_timestamp();

-- name: unmet_partitions
-- Partitions of a queue (one, or all of them) that a subscription of a group covers, but where it has no cursor yet.
SELECT DISTINCT p.id
FROM queen.queues q
JOIN queen.subscriptions s ON s.queue_name = q.name AND s.group_id = $1
JOIN queen.partitions p ON p.queue_id = q.id AND s.partition_name IN ('', p.name)
WHERE q.id = $2 AND ($3::text IS NULL OR p.name = $3)
    AND NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = s.group_id);

-- name: hold_group_cursors
-- Lock the cursors of a group on a queue, or on one of its partitions, in the order in which all lock them.
SELECT c.partition_id FROM queen.partitions p
JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = $1
WHERE p.queue_id = $2 AND ($3::text IS NULL OR p.name = $3)
ORDER BY c.partition_id FOR UPDATE OF c;

-- name: partition_spans
-- What partitions hold, and since when.
SELECT id, floor_offset, next_offset, created_at, last_at FROM queen.partitions WHERE id = ANY($1::bigint[]) ORDER BY id;

-- name: move_cursors
-- Put locked cursors of a group where they shall go on, and end their leases.
UPDATE queen.cursors c SET
    committed = i.committed, lease_id = NULL, lease_until = NULL, lease_start = 0, lease_end = 0
FROM unnest($2::bigint[], $3::bigint[]) AS i (partition_id, committed)
WHERE c.partition_id = i.partition_id AND c.group_id = $1;

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
