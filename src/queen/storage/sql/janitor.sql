-- Background jobs: what is too old is removed, a few rows at a time. Segments are found and deleted by primary key.

-- name: janitor_vacant
-- Whether the lock of the background jobs is free; it is released with this statement.
SELECT pg_try_advisory_xact_lock($1) AS vacant;

-- name: janitor_take
-- Take the lock of the background jobs, for as long as this session lasts.
SELECT pg_try_advisory_lock($1) AS taken;

-- name: end_silent_janitor
-- End the session that holds the lock of the background jobs, if PostgreSQL has been waiting for it to speak for some
-- seconds. It says something every second, so its process is stopped or unreachable.
SELECT pg_terminate_backend(a.pid)
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.classid::bigint = $1::bigint >> 32 AND l.objid::bigint = $1::bigint & 4294967295
    AND a.wait_event = 'ClientRead' AND a.state_change < clock_timestamp() - make_interval(secs => $2::float8);

-- name: queues_with_retention
-- The queues whose messages are removed by age.
SELECT id, name, retention_seconds, completed_retention_seconds FROM queen.queues
WHERE retention_enabled AND (retention_seconds > 0 OR completed_retention_seconds > 0) ORDER BY id;

-- name: queues_with_eviction
-- The queues whose messages may wait, or live, only so long.
SELECT id, name, max_wait_time_seconds, coalesce(ttl, 0) AS ttl FROM queen.queues
WHERE max_wait_time_seconds > 0 OR ttl > 0 ORDER BY id;

-- name: partitions_after
-- A page of a queue's partitions after an id ($2), in order. `settled`: made so many seconds ($4) ago that none with a
-- lower id can be committed any more.
SELECT id, created_at < statement_timestamp() - make_interval(secs => $4::float8) AS settled
FROM queen.partitions WHERE (queue_id, id) > ($1, $2) AND queue_id <= $1 ORDER BY queue_id, id LIMIT $3;

-- name: look_aged
-- What there is to do in partitions ($1) for messages older than some seconds ($2). `wait`: seconds until the oldest
-- segment is that old, null when there is none; `due`: it is, or lies below the floor; `idle`: seconds since a push.
SELECT p.id, extract(epoch FROM s.created_at - statement_timestamp())::float8 + $2::float8 AS wait,
    extract(epoch FROM statement_timestamp() - coalesce(p.last_at, p.created_at))::float8 AS idle,
    coalesce(s.created_at < statement_timestamp() - make_interval(secs => $2::float8)
        OR s.base_offset + s.count <= p.floor_offset, false) AS due
FROM unnest($1::bigint[]) AS i (id)
JOIN queen.partitions p ON p.id = i.id
LEFT JOIN LATERAL (
    SELECT base_offset, count, created_at FROM queen.segments WHERE partition_id = p.id ORDER BY base_offset LIMIT 1
) s ON true;

-- name: look_consumed
-- The same, but due only when every group that has a cursor has consumed that segment.
SELECT p.id, extract(epoch FROM s.created_at - statement_timestamp())::float8 + $2::float8 AS wait,
    extract(epoch FROM statement_timestamp() - coalesce(p.last_at, p.created_at))::float8 AS idle,
    coalesce((s.created_at < statement_timestamp() - make_interval(secs => $2::float8) AND s.base_offset + s.count <=
            (SELECT min(committed) FROM queen.cursors WHERE partition_id = p.id))
        OR s.base_offset + s.count <= p.floor_offset, false) AS due
FROM unnest($1::bigint[]) AS i (id)
JOIN queen.partitions p ON p.id = i.id
LEFT JOIN LATERAL (
    SELECT base_offset, count, created_at FROM queen.segments WHERE partition_id = p.id ORDER BY base_offset LIMIT 1
) s ON true;

-- name: look_waiting
-- The same for the first message that some group has not consumed (or the first at all, when no group has a cursor).
SELECT p.id, extract(epoch FROM s.created_at - statement_timestamp())::float8 + $2::float8 AS wait,
    extract(epoch FROM statement_timestamp() - coalesce(p.last_at, p.created_at))::float8 AS idle,
    coalesce(s.created_at < statement_timestamp() - make_interval(secs => $2::float8), false) OR coalesce((
        SELECT g.base_offset + g.count <= p.floor_offset FROM queen.segments g WHERE g.partition_id = p.id
        ORDER BY g.base_offset LIMIT 1), false) AS due
FROM unnest($1::bigint[]) AS i (id)
JOIN queen.partitions p ON p.id = i.id
CROSS JOIN LATERAL (
    SELECT greatest(p.floor_offset, coalesce(min(committed), 0)) AS first FROM queen.cursors WHERE partition_id = p.id
) w
LEFT JOIN LATERAL (
    SELECT created_at FROM queen.segments
    WHERE partition_id = p.id AND base_offset <= w.first AND w.first < p.next_offset ORDER BY base_offset DESC LIMIT 1
) s ON true;

-- name: raise_floors_aged
-- Deliver nothing of partitions ($1, ascending) that is older than some seconds ($2) any more, looking at a number of
-- segments ($3) of each. A row for each that was changed; `full`: all the segments examined are that old.
WITH due AS MATERIALIZED (
    SELECT p.id, o.upto, o.full
    FROM unnest($1::bigint[]) AS i (id)
    JOIN queen.partitions p ON p.id = i.id
    CROSS JOIN LATERAL (
        SELECT max(s.base_offset + s.count) AS upto, count(*) = $3 AS full
        FROM (
            SELECT base_offset, count, created_at FROM queen.segments
            WHERE partition_id = p.id AND base_offset >= p.floor_offset ORDER BY base_offset LIMIT $3
        ) s
        WHERE s.created_at < clock_timestamp() - make_interval(secs => $2::float8)
    ) o
    WHERE o.upto > p.floor_offset
), held AS MATERIALIZED (
    SELECT p.id FROM queen.partitions p JOIN due d ON d.id = p.id ORDER BY p.id FOR UPDATE OF p
)
UPDATE queen.partitions p SET floor_offset = greatest(p.floor_offset, d.upto)
FROM held h JOIN due d ON d.id = h.id WHERE p.id = h.id
RETURNING p.id, d.full;

-- name: raise_floors_consumed
-- The same, not passing what some group that has a cursor has not consumed.
WITH due AS MATERIALIZED (
    SELECT p.id, o.upto, o.full
    FROM unnest($1::bigint[]) AS i (id)
    JOIN queen.partitions p ON p.id = i.id
    CROSS JOIN LATERAL (SELECT min(committed) AS consumed FROM queen.cursors WHERE partition_id = p.id) c
    CROSS JOIN LATERAL (
        SELECT max(s.base_offset + s.count) AS upto, count(*) = $3 AS full
        FROM (
            SELECT base_offset, count, created_at FROM queen.segments
            WHERE partition_id = p.id AND base_offset >= p.floor_offset ORDER BY base_offset LIMIT $3
        ) s
        WHERE s.created_at < clock_timestamp() - make_interval(secs => $2::float8)
            AND s.base_offset + s.count <= c.consumed
    ) o
    WHERE o.upto > p.floor_offset
), held AS MATERIALIZED (
    SELECT p.id FROM queen.partitions p JOIN due d ON d.id = p.id ORDER BY p.id FOR UPDATE OF p
)
UPDATE queen.partitions p SET floor_offset = greatest(p.floor_offset, d.upto)
FROM held h JOIN due d ON d.id = h.id WHERE p.id = h.id
RETURNING p.id, d.full;

-- name: raise_floors_waiting
-- The same, for what some group has not consumed: looks from the segment with the first such message on.
WITH due AS MATERIALIZED (
    SELECT p.id, o.upto, o.full
    FROM unnest($1::bigint[]) AS i (id)
    JOIN queen.partitions p ON p.id = i.id
    CROSS JOIN LATERAL (
        SELECT greatest(p.floor_offset, coalesce(min(committed), 0)) AS first
        FROM queen.cursors WHERE partition_id = p.id
    ) w
    CROSS JOIN LATERAL (
        SELECT max(s.base_offset + s.count) AS upto, count(*) = $3 AS full
        FROM (
            SELECT base_offset, count, created_at FROM queen.segments
            WHERE partition_id = p.id AND base_offset >= (
                SELECT b.base_offset FROM queen.segments b
                WHERE b.partition_id = p.id AND b.base_offset <= w.first ORDER BY b.base_offset DESC LIMIT 1)
            ORDER BY base_offset LIMIT $3
        ) s
        WHERE s.created_at < clock_timestamp() - make_interval(secs => $2::float8)
    ) o
    WHERE w.first < p.next_offset AND o.upto > p.floor_offset
), held AS MATERIALIZED (
    SELECT p.id FROM queen.partitions p JOIN due d ON d.id = p.id ORDER BY p.id FOR UPDATE OF p
)
UPDATE queen.partitions p SET floor_offset = greatest(p.floor_offset, d.upto)
FROM held h JOIN due d ON d.id = h.id WHERE p.id = h.id
RETURNING p.id, d.full;

-- name: sweep
-- Delete the segments of partitions below their floors, each from an offset on, so many at most in all. What a live
-- lease holds stays, because its ack may still turn it into a dead letter.
WITH edges AS MATERIALIZED (
    SELECT p.id, i.from_offset, least(p.floor_offset, (
        SELECT min(c.lease_start) FROM queen.cursors c
        WHERE c.partition_id = p.id AND c.lease_id IS NOT NULL AND c.lease_until > clock_timestamp())) AS upto
    FROM unnest($1::bigint[], $2::bigint[]) AS i (id, from_offset)
    JOIN queen.partitions p ON p.id = i.id
), doomed AS MATERIALIZED (
    SELECT e.id, s.base_offset
    FROM edges e
    CROSS JOIN LATERAL (
        SELECT base_offset, count FROM queen.segments
        WHERE partition_id = e.id AND base_offset >= e.from_offset AND base_offset < e.upto
        ORDER BY base_offset LIMIT $3
    ) s
    WHERE s.base_offset + s.count <= e.upto
    LIMIT $3
), gone AS (
    DELETE FROM queen.segments s USING doomed d WHERE s.partition_id = d.id AND s.base_offset = d.base_offset
    RETURNING s.partition_id, s.base_offset, s.count
)
SELECT partition_id AS id, count(*) AS segments, sum(count)::bigint AS messages, max(base_offset + count) AS upto
FROM gone GROUP BY partition_id;

-- name: remove_old_traces
-- Delete traces of messages of partitions, each below an offset, so many at most in all.
DELETE FROM queen.traces WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, upto)
    CROSS JOIN LATERAL (
        SELECT id FROM queen.traces WHERE partition_id = i.partition_id AND message_offset < i.upto
        ORDER BY message_offset, id LIMIT $3
    ) t
    LIMIT $3
)) RETURNING 1;

-- name: note_removed
-- Record how many messages a run removed from a queue, and why.
INSERT INTO queen.retention_history (queue_name, kind, messages) VALUES ($1, $2, $3);

-- name: remove_old_history
-- Delete records of removals older than some days, so many at most.
DELETE FROM queen.retention_history WHERE id = ANY(ARRAY(
    SELECT id FROM queen.retention_history WHERE at < clock_timestamp() - make_interval(days => $1) ORDER BY at LIMIT $2
)) RETURNING 1;

-- name: unswept_partitions
-- Of a page of all partitions, those that have segments below their floor. Where pops raise it, eviction sweeps.
SELECT p.id
FROM (SELECT id, queue_id, floor_offset FROM queen.partitions WHERE id > $1 ORDER BY id LIMIT $2) p
JOIN queen.queues q ON q.id = p.queue_id
WHERE p.floor_offset > 0 AND coalesce(q.ttl, 0) = 0
    AND EXISTS (SELECT FROM queen.segments s WHERE s.partition_id = p.id AND s.base_offset < p.floor_offset)
ORDER BY p.id;

-- name: idle_partitions
-- Of a page of all partitions, those that hold nothing, are not used since some days and have no dead letters.
SELECT p.id, p.queue_id, p.next_offset
FROM (SELECT * FROM queen.partitions WHERE id > $1 ORDER BY id LIMIT $2) p
WHERE coalesce(p.last_at, p.created_at) < clock_timestamp() - make_interval(days => $3)
    AND NOT EXISTS (SELECT FROM queen.segments s WHERE s.partition_id = p.id)
    AND NOT EXISTS (
        SELECT FROM queen.cursors c WHERE c.partition_id = p.id
            AND greatest(c.created_at, c.lease_acquired_at, c.last_consumed_at, c.lease_until)
                >= clock_timestamp() - make_interval(days => $3))
    AND NOT EXISTS (SELECT FROM queen.dead_letters d WHERE d.partition_id = p.id)
ORDER BY p.id;

-- name: all_partitions_page_end
-- The last id of a page of all partitions.
SELECT max(id) AS last_id, count(*) AS found
FROM (SELECT id FROM queen.partitions WHERE id > $1 ORDER BY id LIMIT $2) p;

-- name: remove_partition
-- Delete an empty partition with what hangs on it, unless it was pushed to meanwhile: a push moves its next offset.
WITH gone AS (
    DELETE FROM queen.partitions WHERE id = $1 AND next_offset = $2 RETURNING id, queue_id
), noted AS (
    INSERT INTO queen.changes (kind, queue_id, partition_id) SELECT 'x', queue_id, id FROM gone
), cursors AS (
    DELETE FROM queen.cursors c USING gone g WHERE c.partition_id = g.id
), traces AS (
    DELETE FROM queen.traces t USING gone g WHERE t.partition_id = g.id
), dropped AS (
    INSERT INTO queen.dropped_partitions (partition_id) SELECT id FROM gone ON CONFLICT DO NOTHING
)
SELECT id FROM gone;

-- name: dropped_partitions
-- A page of partitions whose rows are gone.
SELECT partition_id FROM queen.dropped_partitions ORDER BY partition_id LIMIT $1;

-- name: remove_dropped_segments
-- Delete segments of dropped partitions, each from an offset on, so many at most in all.
WITH doomed AS MATERIALIZED (
    SELECT s.partition_id, s.base_offset
    FROM unnest($1::bigint[], $2::bigint[]) AS i (partition_id, from_offset)
    CROSS JOIN LATERAL (
        SELECT partition_id, base_offset FROM queen.segments
        WHERE partition_id = i.partition_id AND base_offset >= i.from_offset ORDER BY base_offset LIMIT $3
    ) s
    LIMIT $3
), gone AS (
    DELETE FROM queen.segments s USING doomed d
    WHERE s.partition_id = d.partition_id AND s.base_offset = d.base_offset
    RETURNING s.partition_id, s.base_offset
)
SELECT partition_id, count(*) AS segments, max(base_offset) AS last_offset FROM gone GROUP BY partition_id;

-- name: forget_dropped
-- Nothing is left of these dropped partitions.
DELETE FROM queen.dropped_partitions WHERE partition_id = ANY($1::bigint[]);

-- name: newest_group
-- The highest id of a consumer group.
SELECT coalesce(max(id), 0) AS id FROM queen.groups;

-- name: remove_unused_groups
-- Remove groups up to an id ($1), so many at once ($2), that have neither cursors nor subscriptions nor dead letters;
-- returns their names, and the number of the change.
WITH unused AS MATERIALIZED (
    SELECT g.id FROM queen.groups g
    WHERE g.id <= $1 AND g.name <> '__QUEUE_MODE__' AND NOT EXISTS (SELECT FROM queen.cursors WHERE group_id = g.id)
        AND NOT EXISTS (SELECT FROM queen.subscriptions WHERE group_id = g.id)
    LIMIT $2
), gone AS (
    DELETE FROM queen.groups WHERE id IN (SELECT id FROM unused)
        AND NOT EXISTS (SELECT FROM queen.dead_letters WHERE group_id = queen.groups.id)
    RETURNING name
)
INSERT INTO queen.changes (kind, name) SELECT 'g', name FROM gone RETURNING xid, name;

-- name: remove_old_subscriptions
-- Remove subscriptions to queues that have not come to exist within some seconds ($1), so many at once ($2).
DELETE FROM queen.subscriptions WHERE ctid = ANY (ARRAY(
    SELECT s.ctid FROM queen.subscriptions s
    WHERE s.created_at < statement_timestamp() - make_interval(secs => $1::float8)
        AND NOT EXISTS (SELECT FROM queen.queues q WHERE q.name = s.queue_name)
    LIMIT $2
)) RETURNING queue_name;
