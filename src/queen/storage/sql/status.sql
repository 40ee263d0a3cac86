-- Depths of queues and positions of groups. No segment is read, and nothing is estimated.

-- name: queue_ids
-- The queues of a name, namespace and task; empty: any.
SELECT id FROM queen.queues
WHERE ($1::text = '' OR name = $1) AND ($2::text = '' OR namespace = $2) AND ($3::text = '' OR task = $3);

-- name: queue_stats
-- What each queue (of these ids; null: any) holds. Of several groups, the one furthest behind counts;
-- for what is `finished`, the one that is furthest. `behind` are the partitions that have something pending, and
-- `median_behind` is over those of all these queues. Cursors are summed up in the order of their key, along with the
-- partitions: a hash of a million of them would not fit into memory.
WITH chosen AS (
    SELECT id, public_id, name, namespace, task FROM queen.queues
    WHERE $1::integer[] IS NULL OR id = ANY ($1::integer[])
), held AS MATERIALIZED (
    SELECT p.id, p.queue_id, p.next_offset, p.floor_offset, greatest(min(c.committed), p.floor_offset) AS slowest,
        greatest(max(c.committed), p.floor_offset) AS furthest, sum(c.total_consumed) AS consumed,
        bool_or(c.lease_until > statement_timestamp()) AS leased
    FROM queen.partitions p LEFT JOIN queen.cursors c ON c.partition_id = p.id
    WHERE $1::integer[] IS NULL OR p.queue_id = ANY ($1::integer[])
    GROUP BY p.id
), summed AS (
    SELECT queue_id, count(*) AS partitions, sum(next_offset)::bigint AS pushed,
        sum(next_offset - floor_offset)::bigint AS stored, sum(next_offset - slowest)::bigint AS pending,
        sum(furthest - floor_offset)::bigint AS finished, sum(consumed)::bigint AS consumed,
        count(*) FILTER (WHERE next_offset > slowest) AS behind,
        min(next_offset - slowest) FILTER (WHERE next_offset > slowest) AS min_behind,
        max(next_offset - slowest) AS max_behind
    FROM held GROUP BY queue_id
), median AS (
    SELECT coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY next_offset - slowest), 0) AS median_behind
    FROM held WHERE next_offset > slowest
), leased AS (
    SELECT queue_id, count(*) AS leased_partitions, sum(leases)::bigint AS leases, sum(leased)::bigint AS leased,
        sum(acked)::bigint AS acked, sum(greatest(0, processing))::bigint AS processing
    FROM (
        SELECT h.queue_id, count(*) AS leases, sum(c.lease_end - c.lease_start) AS leased,
            sum(c.committed - c.lease_start) AS acked,
            max(least(c.lease_end, h.next_offset) - greatest(c.committed, h.floor_offset)) AS processing
        FROM held h JOIN queen.cursors c ON c.partition_id = h.id
        WHERE h.leased AND c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp()
        GROUP BY h.queue_id, h.id
    ) l GROUP BY queue_id
), dead AS (
    SELECT queue_id, count(*) AS dead_letters FROM queen.dead_letters
    WHERE $1::integer[] IS NULL OR queue_id = ANY ($1::integer[]) GROUP BY queue_id
)
SELECT q.id, q.public_id, q.name, q.namespace, q.task, coalesce(s.partitions, 0) AS partitions,
    coalesce(s.pushed, 0) AS pushed, coalesce(s.stored, 0) AS stored, coalesce(s.pending, 0) AS pending,
    coalesce(l.processing, 0) AS processing, coalesce(s.finished, 0) AS finished, coalesce(s.consumed, 0) AS consumed,
    coalesce(s.behind, 0) AS behind, s.min_behind, coalesce(s.max_behind, 0) AS max_behind, m.median_behind,
    coalesce(l.leases, 0) AS leases, coalesce(l.leased_partitions, 0) AS leased_partitions,
    coalesce(l.leased, 0) AS leased, coalesce(l.acked, 0) AS acked, coalesce(d.dead_letters, 0) AS dead_letters,
    statement_timestamp() AS at
FROM chosen q CROSS JOIN median m
LEFT JOIN summed s ON s.queue_id = q.id LEFT JOIN leased l ON l.queue_id = q.id
LEFT JOIN dead d ON d.queue_id = q.id ORDER BY q.name;

-- name: group_lags
-- How many messages each group has before it on each queue. $1-$3 say where groups are to start on partitions that
-- their subscriptions cover but where they have no cursor yet, as far as there are messages for them.
SELECT g.name AS group_name, q.name AS queue_name, l.behind
FROM (
    SELECT group_id, queue_id, sum(behind)::bigint AS behind
    FROM (
        SELECT c.group_id, p.queue_id, p.next_offset - greatest(c.committed, p.floor_offset) AS behind
        FROM queen.cursors c JOIN queen.partitions p ON p.id = c.partition_id
        UNION ALL
        SELECT n.group_id, p.queue_id, p.next_offset - greatest(n.start, p.floor_offset)
        FROM unnest($1::integer[], $2::bigint[], $3::bigint[]) AS n (group_id, partition_id, start)
        JOIN queen.partitions p ON p.id = n.partition_id
    ) k GROUP BY group_id, queue_id
) l
JOIN queen.groups g ON g.id = l.group_id
JOIN queen.queues q ON q.id = l.queue_id;

-- name: queue_backlog
-- The partitions of a queue ($1) with messages that a group ($2; null: the slowest one of each) has yet to consume, the
-- largest backlog first, and how many partitions and messages these are in all. Where the group has no cursor yet, all are,
-- unless its subscription is younger.
SELECT p.name AS partition, b.pending, count(*) OVER () AS partitions, (sum(b.pending) OVER ())::bigint AS pending_in_all
FROM queen.queues q
JOIN queen.partitions p ON p.queue_id = q.id
CROSS JOIN LATERAL (
    SELECT max(p.next_offset - greatest(c.committed, p.floor_offset)) AS behind
    FROM queen.cursors c JOIN queen.groups g ON g.id = c.group_id
    WHERE c.partition_id = p.id AND ($2::text IS NULL OR g.name = $2)
) c
CROSS JOIN LATERAL (
    SELECT coalesce(c.behind, CASE WHEN EXISTS (
        SELECT FROM queen.subscriptions s JOIN queen.groups g ON g.id = s.group_id
        WHERE g.name = $2 AND s.queue_name = q.name AND s.partition_name IN ('', p.name) AND s.since >= p.last_at
    ) THEN 0 ELSE p.next_offset - p.floor_offset END) AS pending
) b
WHERE q.name = $1 AND b.pending > 0
ORDER BY b.pending DESC, p.name LIMIT 1000;

-- name: queue_conflation
-- Whether a group ($2) gets only the newest message of each partition of a queue ($1).
SELECT EXISTS (
    SELECT FROM queen.subscriptions s JOIN queen.groups g ON g.id = s.group_id
    WHERE g.name = $2 AND s.queue_name = $1 AND s.partition_name = '' AND s.conflation
) AS conflation;

-- name: queue_depth
-- How many messages a queue stores (the first row), and how many of them each group has yet to consume, by name. On a
-- partition that a subscription covers but where the group has no cursor yet, those stored after its time count. No rows:
-- there is no such queue.
WITH stored AS (
    SELECT q.name AS queue_name, p.id, p.name, p.floor_offset, p.next_offset, p.last_at
    FROM queen.queues q LEFT JOIN queen.partitions p ON p.queue_id = q.id
    WHERE q.name = $1
), lags AS (
    SELECT c.group_id, p.next_offset - greatest(c.committed, p.floor_offset) AS behind
    FROM stored p JOIN queen.cursors c ON c.partition_id = p.id
    UNION ALL
    SELECT u.group_id, CASE WHEN u.last_at > u.since THEN u.next_offset - greatest(f.first_offset, u.floor_offset) ELSE 0 END
    FROM (
        SELECT DISTINCT ON (s.group_id, p.id) s.group_id, s.since, p.id, p.floor_offset, p.next_offset, p.last_at
        FROM stored p
        JOIN queen.subscriptions s ON s.queue_name = p.queue_name AND s.partition_name IN ('', p.name)
        WHERE NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = s.group_id)
        ORDER BY s.group_id, p.id, s.partition_name DESC
    ) u
    CROSS JOIN LATERAL (
        SELECT coalesce(min(g.base_offset), u.next_offset) AS first_offset
        FROM queen.segments g WHERE g.partition_id = u.id AND g.created_at > u.since
    ) f
)
SELECT group_name, depth
FROM (
    SELECT NULL AS group_name, coalesce(sum(next_offset - floor_offset), 0)::bigint AS depth
    FROM stored HAVING count(*) > 0
    UNION ALL
    SELECT g.name, sum(l.behind)::bigint FROM lags l JOIN queen.groups g ON g.id = l.group_id GROUP BY g.name
) d
ORDER BY group_name NULLS FIRST;

-- name: dead_letter_counts
-- How many dead letters each queue has, and of how many partitions.
SELECT q.name, d.messages, d.partitions
FROM (
    SELECT queue_id, count(*) AS messages, count(DISTINCT partition_id) AS partitions
    FROM queen.dead_letters GROUP BY queue_id
) d JOIN queen.queues q ON q.id = d.queue_id;

-- name: top_errors
-- The errors that the newest dead letters (of queues of these ids) died of most often.
SELECT error_message AS error, count(*) AS found
FROM (
    SELECT error_message FROM queen.dead_letters WHERE queue_id = ANY($1::integer[])
    ORDER BY failed_at DESC, id DESC LIMIT 1000
) d GROUP BY error_message ORDER BY found DESC, error LIMIT 10;

-- name: stored_by_time
-- How many of the messages still stored in queues (of these ids) were stored in each span of $4 seconds, from $2 until
-- before $3. Each partition is walked from one span that has messages to the next; where a span ends is found by
-- bisection, unless it has one segment alone or the newest message of the partition.
SELECT w.bucket, sum(w.messages)::bigint AS messages
FROM queen.partitions p
CROSS JOIN LATERAL (
    WITH RECURSIVE walk (bucket, messages, upto) AS (
        SELECT NULL::timestamptz, 0::bigint, CASE WHEN (
            SELECT g.created_at >= $2 FROM queen.segments g
            WHERE g.partition_id = p.id AND g.base_offset <= p.floor_offset ORDER BY g.base_offset DESC LIMIT 1
        ) THEN p.floor_offset ELSE (
            WITH RECURSIVE bisection (low, high) AS (
                SELECT p.floor_offset, p.next_offset
                UNION ALL
                SELECT
                    CASE WHEN s.ends > b.low AND s.created_at >= $2 THEN b.low
                        ELSE greatest(s.ends, m.middle + 1) END,
                    CASE WHEN s.ends > b.low AND s.created_at >= $2 THEN greatest(s.base_offset, b.low)
                        ELSE b.high END
                FROM bisection b
                CROSS JOIN LATERAL (SELECT (b.low + b.high - 1) / 2 AS middle) m
                LEFT JOIN LATERAL (
                    SELECT g.base_offset, g.base_offset + g.count AS ends, g.created_at FROM queen.segments g
                    WHERE g.partition_id = p.id AND g.base_offset <= m.middle ORDER BY g.base_offset DESC LIMIT 1
                ) s ON true
                WHERE b.low < b.high
            )
            SELECT low FROM bisection WHERE low >= high
        ) END
        UNION ALL
        SELECT f.bucket, f.upto - w.upto, f.upto
        FROM walk w
        CROSS JOIN LATERAL (
            SELECT date_bin(make_interval(secs => $4), g.created_at, 'epoch') AS bucket, g.created_at,
                g.base_offset + g.count AS ends
            FROM queen.segments g
            WHERE g.partition_id = p.id AND g.base_offset <= w.upto ORDER BY g.base_offset DESC LIMIT 1
        ) s
        CROSS JOIN LATERAL (SELECT least(s.bucket + make_interval(secs => $4), $3) AS ends) e
        CROSS JOIN LATERAL (SELECT s.bucket, CASE WHEN p.last_at < e.ends THEN p.next_offset WHEN (
            SELECT g.created_at >= e.ends FROM queen.segments g
            WHERE g.partition_id = p.id AND g.base_offset >= s.ends ORDER BY g.base_offset LIMIT 1
        ) THEN s.ends ELSE (
            WITH RECURSIVE bisection (low, high) AS (
                SELECT w.upto, p.next_offset
                UNION ALL
                SELECT
                    CASE WHEN s.ends > b.low AND s.created_at >= e.ends THEN b.low
                        ELSE greatest(s.ends, m.middle + 1) END,
                    CASE WHEN s.ends > b.low AND s.created_at >= e.ends THEN greatest(s.base_offset, b.low)
                        ELSE b.high END
                FROM bisection b
                CROSS JOIN LATERAL (SELECT (b.low + b.high - 1) / 2 AS middle) m
                LEFT JOIN LATERAL (
                    SELECT g.base_offset, g.base_offset + g.count AS ends, g.created_at FROM queen.segments g
                    WHERE g.partition_id = p.id AND g.base_offset <= m.middle ORDER BY g.base_offset DESC LIMIT 1
                ) s ON true
                WHERE b.low < b.high
            )
            SELECT low FROM bisection WHERE low >= high
        ) END AS upto) f
        WHERE w.upto < p.next_offset AND s.created_at < $3
    )
    SELECT bucket, messages FROM walk WHERE bucket IS NOT NULL
) w
WHERE p.queue_id = ANY($1::integer[]) AND p.last_at >= $2 AND p.next_offset > p.floor_offset
GROUP BY w.bucket ORDER BY w.bucket;
