-- Administration of queues: replacing options, deleting, clearing, and the numbers that views show.
-- Everywhere: a group that has no cursor on a partition does not count there; a partition without any cursor is
-- pending as a whole.

-- name: configure_queue
-- Create a queue or replace all its options.
INSERT INTO queen.queues (
    name, namespace, task, priority, lease_time, retry_limit, retry_delay, max_size, ttl, dead_letter_queue,
    dlq_after_max_retries, delayed_processing, window_buffer, retention_seconds, completed_retention_seconds,
    retention_enabled, encryption_enabled, max_wait_time_seconds, dedup_window_seconds
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
ON CONFLICT (name) DO UPDATE SET
    namespace = excluded.namespace,
    task = excluded.task,
    priority = excluded.priority,
    lease_time = excluded.lease_time,
    retry_limit = excluded.retry_limit,
    retry_delay = excluded.retry_delay,
    max_size = excluded.max_size,
    ttl = excluded.ttl,
    dead_letter_queue = excluded.dead_letter_queue,
    dlq_after_max_retries = excluded.dlq_after_max_retries,
    delayed_processing = excluded.delayed_processing,
    window_buffer = excluded.window_buffer,
    retention_seconds = excluded.retention_seconds,
    completed_retention_seconds = excluded.completed_retention_seconds,
    retention_enabled = excluded.retention_enabled,
    encryption_enabled = excluded.encryption_enabled,
    max_wait_time_seconds = excluded.max_wait_time_seconds,
    dedup_window_seconds = excluded.dedup_window_seconds
RETURNING *;

-- name: pause_queue
-- Pause or resume a queue; no row when there is none of that name.
WITH held AS MATERIALIZED (
    SELECT id, paused FROM queen.queues WHERE name = $1 FOR UPDATE
), changed AS (
    UPDATE queen.queues q SET paused = $2 FROM held h WHERE q.id = h.id AND h.paused <> $2 RETURNING 1
)
SELECT EXISTS (SELECT FROM changed) AS changed FROM held;

-- name: pause_group
-- Pause or resume a group on a queue; no row when there is no such queue.
WITH held AS MATERIALIZED (
    SELECT id, $2::text = ANY (paused_groups) AS paused FROM queen.queues WHERE name = $1 FOR UPDATE
), changed AS (
    UPDATE queen.queues q SET paused_groups = CASE WHEN $3::boolean THEN array_append(q.paused_groups, $2::text)
        ELSE array_remove(q.paused_groups, $2::text) END
    FROM held h WHERE q.id = h.id AND h.paused <> $3::boolean RETURNING 1
)
SELECT EXISTS (SELECT FROM changed) AS changed FROM held;

-- name: forget_pauses
-- Resume a group on one queue ($2), or on all (null); gives the queues where it was paused.
UPDATE queen.queues SET paused_groups = array_remove(paused_groups, $1::text)
WHERE $1::text = ANY (paused_groups) AND ($2::text IS NULL OR name = $2) RETURNING name;

-- name: paused_queues
-- Queues that are paused, as a whole or for some groups.
SELECT name, paused, paused_groups FROM queen.queues WHERE paused OR paused_groups <> '{}' ORDER BY name;

-- name: hold_queue
-- Lock a queue against new partitions.
SELECT id FROM queen.queues WHERE name = $1 FOR UPDATE;

-- name: drop_queue_partitions
-- Remember the partitions of a queue that is about to go, so that what they hold is removed afterwards. They are locked
-- in the order in which pushes lock them.
WITH held AS MATERIALIZED (
    SELECT id FROM queen.partitions WHERE queue_id = $1 ORDER BY id FOR UPDATE
)
INSERT INTO queen.dropped_partitions (partition_id) SELECT id FROM held
ON CONFLICT (partition_id) DO NOTHING RETURNING partition_id;

-- name: drop_queue
-- A queue and its partitions.
DELETE FROM queen.queues WHERE id = $1;

-- name: sweep_cursors
-- Some of the cursors on partitions that are gone.
WITH doomed AS MATERIALIZED (
    SELECT partition_id, group_id FROM queen.cursors WHERE partition_id = ANY($1::bigint[])
    ORDER BY partition_id, group_id LIMIT $2 FOR UPDATE
)
DELETE FROM queen.cursors c USING doomed d
WHERE c.partition_id = d.partition_id AND c.group_id = d.group_id RETURNING 1;

-- name: sweep_dead_letters
-- Some of the dead letters of partitions that are gone.
DELETE FROM queen.dead_letters WHERE id = ANY(ARRAY(
    SELECT id FROM queen.dead_letters WHERE partition_id = ANY($1::bigint[]) LIMIT $2
)) RETURNING 1;

-- name: sweep_traces
-- Some of the traces of messages on partitions that are gone.
DELETE FROM queen.traces WHERE id = ANY(ARRAY(
    SELECT id FROM queen.traces WHERE partition_id = ANY($1::bigint[]) LIMIT $2
)) RETURNING 1;

-- name: clear_partitions
-- Put everything stored so far in one or all partitions of a queue out of reach, and say how much that was.
WITH held AS MATERIALIZED (
    SELECT id, next_offset, floor_offset FROM queen.partitions
    WHERE queue_id = $1 AND ($2::text IS NULL OR name = $2) ORDER BY id FOR UPDATE
), raised AS (
    UPDATE queen.partitions p SET floor_offset = h.next_offset FROM held h
    WHERE p.id = h.id AND h.floor_offset < h.next_offset
)
SELECT id, next_offset - floor_offset AS messages FROM held;

-- name: remove_cleared_segments
-- Some of the segments out of reach in partitions, from a place on; says where it stopped, nothing when none was left.
WITH doomed AS MATERIALIZED (
    SELECT s.partition_id, s.base_offset
    FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id
    WHERE s.partition_id = ANY($1::bigint[]) AND (s.partition_id, s.base_offset) > ($2::bigint, $3::bigint)
        AND s.base_offset + s.count <= p.floor_offset
    ORDER BY s.partition_id, s.base_offset LIMIT $4
), removed AS (
    DELETE FROM queen.segments s USING doomed d
    WHERE s.partition_id = d.partition_id AND s.base_offset = d.base_offset
)
SELECT partition_id, base_offset FROM doomed ORDER BY partition_id DESC, base_offset DESC LIMIT 1;

-- name: remove_cleared_traces
-- The traces of messages out of reach in partitions.
DELETE FROM queen.traces t USING queen.partitions p
WHERE p.id = ANY($1::bigint[]) AND t.partition_id = p.id AND t.message_offset < p.floor_offset;

-- name: count_queues
-- How many queues a namespace and task have, with a text in their names; empty: any.
SELECT count(*) AS found FROM queen.queues
WHERE ($1::text = '' OR namespace = $1) AND ($2::text = '' OR task = $2)
    AND ($3::text = '' OR position(lower($3) IN lower(name)) > 0);

-- name: queue_list
-- A page of the queues of a namespace and task, with a text ($3) in their names, by name or time ($4; $5: descending),
-- or those of some ids ($6) in that order; with what they hold, unless that is known already ($9: ids).
WITH page AS (
    SELECT id, public_id, name, namespace, task, created_at, paused, row_number() OVER (ORDER BY
        array_position($6::integer[], id),
        CASE WHEN $4::text = 'name' AND NOT $5::boolean THEN name END,
        CASE WHEN $4 = 'name' AND $5 THEN name END DESC,
        CASE WHEN $4 = 'created' AND NOT $5 THEN created_at END,
        CASE WHEN $4 = 'created' AND NOT $5 THEN id END,
        created_at DESC, id DESC) AS place
    FROM queen.queues
    WHERE ($1::text = '' OR namespace = $1) AND ($2::text = '' OR task = $2)
        AND ($3::text = '' OR position(lower($3) IN lower(name)) > 0)
        AND ($6::integer[] IS NULL OR id = ANY ($6::integer[]))
    ORDER BY place LIMIT $7 OFFSET $8
)
SELECT q.id, q.public_id, q.name, q.namespace, q.task, q.created_at, q.paused, coalesce(s.partitions, 0) AS partitions,
    coalesce(s.total, 0) AS total, coalesce(s.pending, 0) AS pending, coalesce(s.processing, 0) AS processing
FROM page q
LEFT JOIN LATERAL (
    SELECT count(*) AS partitions, sum(h.total)::bigint AS total, sum(h.pending)::bigint AS pending,
        sum(h.processing)::bigint AS processing
    FROM (
        SELECT p.next_offset - p.floor_offset AS total,
            coalesce(max(p.next_offset - greatest(c.committed, p.floor_offset)), p.next_offset - p.floor_offset) AS pending,
            greatest(0, max(least(c.lease_end, p.next_offset) - greatest(c.committed, p.floor_offset))
                FILTER (WHERE c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp())) AS processing
        FROM queen.partitions p LEFT JOIN queen.cursors c ON c.partition_id = p.id
        WHERE p.queue_id = q.id AND q.id <> ALL ($9::integer[]) GROUP BY p.id
    ) h
) s ON true
ORDER BY q.place;

-- name: count_partitions
-- How many partitions there are in all, with a text in their names (empty: any).
SELECT count(*) AS found FROM queen.partitions WHERE $1::text = '' OR position(lower($1) IN lower(name)) > 0;

-- name: count_queue_partitions
-- How many partitions a queue has, with a text in their names (empty: any).
SELECT count(*) AS found FROM queen.partitions
WHERE queue_id = $1 AND ($2::text = '' OR position(lower($2) IN lower(name)) > 0);

-- name: partition_page
-- A page of all partitions with a text in their names (empty: any), by queue and name ($2: descending). Queues are gone
-- through in order, so that no more partitions are read than are skipped and returned.
SELECT p.id FROM (
    SELECT id, row_number() OVER (ORDER BY CASE WHEN NOT $2::boolean THEN name END, name DESC) AS place
    FROM queen.queues ORDER BY place
) q
CROSS JOIN LATERAL (
    SELECT id FROM (
        (SELECT id, row_number() OVER (ORDER BY name) AS place FROM queen.partitions
        WHERE queue_id = q.id AND NOT $2 AND ($1::text = '' OR position(lower($1) IN lower(name)) > 0)
        ORDER BY name LIMIT $3::bigint + $4::bigint)
        UNION ALL
        (SELECT id, row_number() OVER (ORDER BY name DESC) FROM queen.partitions
        WHERE queue_id = q.id AND $2 AND ($1 = '' OR position(lower($1) IN lower(name)) > 0)
        ORDER BY name DESC LIMIT $3::bigint + $4::bigint)
    ) o ORDER BY place
) p
LIMIT $3 OFFSET $4;

-- name: queue_partition_page
-- A page of the partitions of a queue with a text ($2) in their names (empty: any), by name, number of messages or time of
-- the newest ($3; $4: descending). By name the index has them in order; each branch but one is empty.
SELECT id FROM (
    (SELECT id FROM queen.partitions WHERE queue_id = $1 AND $3::text = 'name' AND NOT $4::boolean
        AND ($2::text = '' OR position(lower($2) IN lower(name)) > 0) ORDER BY name LIMIT $5 OFFSET $6)
    UNION ALL
    (SELECT id FROM queen.partitions WHERE queue_id = $1 AND $3 = 'name' AND $4
        AND ($2 = '' OR position(lower($2) IN lower(name)) > 0) ORDER BY name DESC LIMIT $5 OFFSET $6)
    UNION ALL
    (SELECT id FROM queen.partitions WHERE queue_id = $1 AND $3 <> 'name'
        AND ($2 = '' OR position(lower($2) IN lower(name)) > 0)
    ORDER BY (CASE WHEN $3 = 'stored' THEN (next_offset - floor_offset)::float8
        ELSE coalesce(extract(epoch FROM last_at), 0)::float8 END) * CASE WHEN $4 THEN -1 ELSE 1 END, name
    LIMIT $5 OFFSET $6)
) p;

-- name: queue_partitions_after
-- A page of the partitions of a queue after a name ($4; empty: from the first), by name.
SELECT id, name FROM queen.partitions WHERE queue_id = $1 AND name > $4 ORDER BY name LIMIT $2 OFFSET $3;

-- name: queue_totals
-- What all partitions of a queue hold together, counted as in partition_list.
WITH dead AS (
    SELECT d.partition_id, d.group_id, count(*) AS found,
        count(*) FILTER (WHERE d.message_offset >= p.floor_offset) AS live
    FROM queen.dead_letters d JOIN queen.partitions p ON p.id = d.partition_id
    WHERE d.queue_id = $1 GROUP BY d.partition_id, d.group_id
), held AS (
    SELECT p.next_offset - p.floor_offset AS total,
        coalesce(max(p.next_offset - greatest(c.committed, p.floor_offset)), p.next_offset - p.floor_offset) AS pending,
        greatest(0, max(least(c.lease_end, p.next_offset) - greatest(c.committed, p.floor_offset))
            FILTER (WHERE c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp())) AS processing,
        greatest(0, max(greatest(c.committed, p.floor_offset) - p.floor_offset - coalesce(d.live, 0))) AS completed
    FROM queen.partitions p
    LEFT JOIN queen.cursors c ON c.partition_id = p.id
    LEFT JOIN dead d ON d.partition_id = p.id AND d.group_id = c.group_id
    WHERE p.queue_id = $1 GROUP BY p.id
)
SELECT coalesce(sum(total), 0)::bigint AS total, coalesce(sum(pending), 0)::bigint AS pending,
    coalesce(sum(processing), 0)::bigint AS processing, coalesce(sum(completed), 0)::bigint AS completed,
    (SELECT coalesce(sum(m.most), 0)::bigint FROM (SELECT max(found) AS most FROM dead GROUP BY partition_id) m)
        AS dead_letter
FROM held;

-- name: partition_list
-- What partitions hold, in the order given. Everything is looked up by partition, so that the cost grows with their
-- number alone whatever the planner believes.
SELECT p.id, p.name, q.name AS queue_name, p.created_at, p.next_offset - p.floor_offset AS total,
    coalesce(n.pending, p.next_offset - p.floor_offset) AS pending, coalesce(n.processing, 0) AS processing,
    coalesce(n.completed, 0) AS completed, d.dead_letter,
    coalesce(n.total_consumed, 0) AS total_consumed, coalesce(n.total_batches, 0) AS total_batches,
    greatest(p.last_at, n.last_consumed_at) AS last_activity,
    CASE WHEN p.next_offset > p.floor_offset THEN coalesce(
        (SELECT f.created_at FROM (
            SELECT s.base_offset + s.count AS ends, s.created_at FROM queen.segments s
            WHERE s.partition_id = p.id AND s.base_offset <= p.floor_offset ORDER BY s.base_offset DESC LIMIT 1
        ) f WHERE f.ends > p.floor_offset),
        (SELECT s.created_at FROM queen.segments s
         WHERE s.partition_id = p.id AND s.base_offset > p.floor_offset ORDER BY s.base_offset LIMIT 1)
    ) END AS oldest,
    CASE WHEN p.next_offset > p.floor_offset THEN p.last_at END AS newest
FROM unnest($1::bigint[]) WITH ORDINALITY AS i (id, slot)
JOIN queen.partitions p ON p.id = i.id
JOIN queen.queues q ON q.id = p.queue_id
CROSS JOIN LATERAL (
    SELECT coalesce(max(g.found), 0) AS dead_letter
    FROM (SELECT count(*) AS found FROM queen.dead_letters WHERE partition_id = p.id GROUP BY group_id) g
) d
CROSS JOIN LATERAL (
    SELECT max(p.next_offset - greatest(c.committed, p.floor_offset)) AS pending,
        max(c.total_consumed) AS total_consumed, max(c.total_batches) AS total_batches,
        max(c.last_consumed_at) AS last_consumed_at,
        greatest(0, max(least(c.lease_end, p.next_offset) - greatest(c.committed, p.floor_offset))
            FILTER (WHERE c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp())) AS processing,
        greatest(0, max(greatest(c.committed, p.floor_offset) - p.floor_offset - CASE WHEN d.dead_letter > 0 THEN (
            SELECT count(*) FROM queen.dead_letters b
            WHERE b.partition_id = p.id AND b.message_offset >= p.floor_offset AND b.group_id = c.group_id
        ) ELSE 0 END)) AS completed
    FROM queen.cursors c WHERE c.partition_id = p.id
) n
ORDER BY i.slot;

-- name: count_everything
-- How many queues, partitions, namespaces and tasks there are.
SELECT count(*) AS queues, count(DISTINCT nullif(namespace, '')) AS namespaces,
    count(DISTINCT nullif(task, '')) AS tasks, (SELECT count(*) FROM queen.partitions) AS partitions
FROM queen.queues;

-- name: offsets_after
-- From times to offsets, by bisection: in each partition, from a low offset on, the first whose message was stored
-- after the time; the high offset when there is none.
SELECT i.slot, f.low AS first_offset
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::timestamptz[]) WITH ORDINALITY
    AS i (partition_id, low, high, moment, slot)
CROSS JOIN LATERAL (
    WITH RECURSIVE bisection (low, high) AS (
        SELECT i.low, i.high
        UNION ALL
        SELECT
            CASE WHEN s.ends > b.low AND s.created_at > i.moment THEN b.low ELSE greatest(s.ends, m.middle + 1) END,
            CASE WHEN s.ends > b.low AND s.created_at > i.moment THEN greatest(s.base_offset, b.low) ELSE b.high END
        FROM bisection b
        CROSS JOIN LATERAL (SELECT (b.low + b.high - 1) / 2 AS middle) m
        LEFT JOIN LATERAL (
            SELECT g.base_offset, g.base_offset + g.count AS ends, g.created_at FROM queen.segments g
            WHERE g.partition_id = i.partition_id AND g.base_offset <= m.middle ORDER BY g.base_offset DESC LIMIT 1
        ) s ON true
        WHERE b.low < b.high
    )
    SELECT low FROM bisection WHERE low >= high
) f;
