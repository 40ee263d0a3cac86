-- Seeks: what they would do, moving cursors, and where these were before.

-- name: preview_seek
-- What a seek of a group ($1) on a queue ($2, of the name $4; or on one partition, $3) to an offset ($7) or to a time ($8)
-- would do: a row of sums, and the partitions ($9 of them) with the largest effect. $5 and $6 say where the group is to
-- start on partitions with news that it has not met. A time is looked for among the segments where a partition has messages of before and of
-- after it: one after the other where it has few, else by bisection.
WITH known AS (
    SELECT p.id, p.name, p.floor_offset, p.next_offset, p.last_at,
        least(greatest(coalesce(c.committed, n.start, p.next_offset), p.floor_offset), p.next_offset) AS position,
        coalesce(c.lease_id IS NOT NULL AND c.lease_until > statement_timestamp(), false) AS leased
    FROM queen.partitions p
    LEFT JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = $1
    LEFT JOIN unnest($5::bigint[], $6::bigint[]) AS n (partition_id, start) ON n.partition_id = p.id
    WHERE p.queue_id = $2 AND ($3::text IS NULL OR p.name = $3) AND (c.group_id IS NOT NULL OR EXISTS (
        SELECT FROM queen.subscriptions s
        WHERE s.group_id = $1 AND s.queue_name = $4 AND s.partition_name IN ('', p.name)
    ))
), aimed AS (
    SELECT k.id, k.name, k.position, k.leased, CASE
        WHEN $8::timestamptz IS NULL THEN least(greatest($7::bigint, k.floor_offset), k.next_offset)
        WHEN k.last_at IS NULL OR k.last_at <= $8 THEN k.next_offset
        WHEN k.next_offset - k.floor_offset <= 64 THEN coalesce((
            SELECT greatest(g.base_offset, k.floor_offset) FROM queen.segments g
            WHERE g.partition_id = k.id AND g.created_at > $8 AND g.base_offset + g.count > k.floor_offset
            ORDER BY g.base_offset LIMIT 1
        ), k.next_offset)
        ELSE (
            WITH RECURSIVE bisection (low, high) AS (
                SELECT k.floor_offset, k.next_offset
                UNION ALL
                SELECT
                    CASE WHEN s.ends > b.low AND s.created_at > $8 THEN b.low ELSE greatest(s.ends, m.middle + 1) END,
                    CASE WHEN s.ends > b.low AND s.created_at > $8 THEN greatest(s.base_offset, b.low) ELSE b.high END
                FROM bisection b
                CROSS JOIN LATERAL (SELECT (b.low + b.high - 1) / 2 AS middle) m
                LEFT JOIN LATERAL (
                    SELECT g.base_offset, g.base_offset + g.count AS ends, g.created_at FROM queen.segments g
                    WHERE g.partition_id = k.id AND g.base_offset <= m.middle ORDER BY g.base_offset DESC LIMIT 1
                ) s ON true
                WHERE b.low < b.high
            )
            SELECT low FROM bisection WHERE low >= high
        ) END AS target
    FROM known k
), moved AS MATERIALIZED (
    SELECT id, name, position, target, leased FROM aimed WHERE leased OR position <> target
), largest AS (
    SELECT id, name, position, target, leased FROM moved
    ORDER BY abs(position - target) DESC, leased DESC, id LIMIT $9
)
SELECT * FROM (
    SELECT NULL::bigint AS id, NULL AS name, (SELECT count(*) FROM known) AS known, coalesce(sum(greatest(0, position - target)), 0)::bigint AS redelivered,
        coalesce(sum(greatest(0, target - position)), 0)::bigint AS skipped,
        count(*) FILTER (WHERE leased) AS leases, count(*) FILTER (WHERE position <> target) AS changed,
        NULL::bigint AS position, NULL::bigint AS target, NULL::boolean AS leased
    FROM moved
    UNION ALL
    SELECT id, name, NULL, greatest(0, position - target), greatest(0, target - position), NULL, NULL, position, target, leased
    FROM largest
) found
ORDER BY id IS NOT NULL, redelivered + skipped DESC, leased DESC, id;

-- name: sample_partitions
-- Some partitions of a queue ($1): those on a share ($2, percent) of the pages of all partitions.
SELECT id FROM queen.partitions TABLESAMPLE SYSTEM ($2::float4) WHERE queue_id = $1;

-- name: unmet_partitions
-- Partitions of a queue (one, or all of them) that a subscription of a group covers, but where it has no cursor yet.
SELECT DISTINCT p.id
FROM queen.queues q
JOIN queen.subscriptions s ON s.queue_name = q.name AND s.group_id = $1
JOIN queen.partitions p ON p.queue_id = q.id AND s.partition_name IN ('', p.name)
WHERE q.id = $2 AND ($3::text IS NULL OR p.name = $3)
    AND NOT EXISTS (SELECT FROM queen.cursors c WHERE c.partition_id = p.id AND c.group_id = s.group_id);

-- name: hold_group_cursors
-- Lock the cursors of a group ($1) on a queue ($2), or on one of its partitions ($3), in the order in which all lock them:
-- so many ($5; null: all) after a partition ($4), or only those whose position an earlier seek ($6) has kept.
SELECT c.partition_id, c.committed, k.committed AS kept FROM queen.partitions p
JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = $1
LEFT JOIN queen.seek_positions k ON k.seek_id = $6::bigint AND k.partition_id = p.id
WHERE p.queue_id = $2 AND p.id > $4::bigint AND ($3::text IS NULL OR p.name = $3)
    AND ($6 IS NULL OR k.seek_id IS NOT NULL)
ORDER BY p.id LIMIT $5::bigint FOR UPDATE OF c;

-- name: partition_spans
-- What partitions hold, and since when.
SELECT id, floor_offset, next_offset, created_at, last_at FROM queen.partitions WHERE id = ANY($1::bigint[]) ORDER BY id;

-- name: move_cursors
-- Put locked cursors of a group where they shall go on, and end their leases.
UPDATE queen.cursors c SET
    committed = i.committed, lease_id = NULL, lease_until = NULL, lease_start = 0, lease_end = 0
FROM unnest($2::bigint[], $3::bigint[]) AS i (partition_id, committed)
WHERE c.partition_id = i.partition_id AND c.group_id = $1;

-- name: begin_seek
-- Note that a group ($1) is moved on a queue ($2), or on a partition of this name ($3), to a place ($4).
INSERT INTO queen.seeks (group_id, queue_id, partition_name, target) VALUES ($1, $2, $3, $4) RETURNING id;

-- name: keep_positions
-- Keep where cursors were before a seek ($1), and count them.
WITH kept AS (
    INSERT INTO queen.seek_positions (seek_id, partition_id, committed)
    SELECT $1, i.partition_id, i.committed FROM unnest($2::bigint[], $3::bigint[]) AS i (partition_id, committed)
    ON CONFLICT (seek_id, partition_id) DO NOTHING RETURNING 1
)
UPDATE queen.seeks SET partitions = partitions + (SELECT count(*) FROM kept) WHERE id = $1;

-- name: trim_seeks
-- Forget the seeks of a group ($1) on a queue ($2) but the newest ($3).
WITH gone AS (
    DELETE FROM queen.seeks WHERE id IN (
        SELECT id FROM queen.seeks WHERE queue_id = $2 AND group_id = $1 ORDER BY id DESC OFFSET $3
    ) RETURNING id
)
DELETE FROM queen.seek_positions WHERE seek_id IN (SELECT id FROM gone);

-- name: seek_by_id
-- A seek ($3) of a group ($1) on a queue ($2).
SELECT id, partition_name, undone_by FROM queen.seeks WHERE id = $3 AND group_id = $1 AND queue_id = $2;

-- name: mark_undone
-- Note which seek ($2) has undone another ($1), unless one has already.
UPDATE queen.seeks SET undone_by = $2 WHERE id = $1 AND undone_by IS NULL RETURNING id;

-- name: seek_list
-- The seeks of a group ($1) on a queue ($2) that are still kept, the newest first.
SELECT id, partition_name, target, sought_at, partitions, undone_by FROM queen.seeks
WHERE queue_id = $2 AND group_id = $1 AND sought_at > statement_timestamp() - make_interval(secs => $3::float8)
ORDER BY id DESC;

-- name: remove_old_seeks
-- Remove positions that were kept for more than some seconds ($1), so many at once ($2), and seeks that have none left.
WITH old AS MATERIALIZED (
    SELECT id FROM queen.seeks WHERE sought_at < statement_timestamp() - make_interval(secs => $1::float8)
    ORDER BY sought_at LIMIT $2
), heads AS (
    DELETE FROM queen.seeks s WHERE s.id IN (SELECT id FROM old)
        AND NOT EXISTS (SELECT FROM queen.seek_positions p WHERE p.seek_id = s.id)
)
DELETE FROM queen.seek_positions WHERE (seek_id, partition_id) IN (
    SELECT p.seek_id, p.partition_id FROM old JOIN queen.seek_positions p ON p.seek_id = old.id LIMIT $2
) RETURNING 1;
