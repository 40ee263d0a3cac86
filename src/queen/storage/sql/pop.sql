-- Leasing and reading. A lease is a span of offsets on a cursor row; nothing is touched per message.

-- name: ensure_cursors
-- Make the cursors a group does not have yet: at the offset after its subscription time, else at the beginning.
INSERT INTO queen.cursors (partition_id, group_id, committed)
SELECT p.id, i.group_id, CASE
    WHEN s.since IS NULL THEN 0
    WHEN p.last_at IS NULL OR p.last_at <= s.since THEN p.next_offset
    ELSE coalesce((SELECT g.base_offset + g.count FROM queen.segments g
        WHERE g.partition_id = p.id AND g.created_at <= s.since ORDER BY g.base_offset DESC LIMIT 1), 0) END
FROM unnest($1::bigint[], $2::integer[]) AS i (partition_id, group_id)
JOIN queen.partitions p ON p.id = i.partition_id
JOIN queen.queues q ON q.id = p.queue_id
LEFT JOIN LATERAL (
    SELECT since FROM queen.subscriptions
    WHERE group_id = i.group_id AND queue_name = q.name AND partition_name IN ('', p.name)
    ORDER BY partition_name DESC LIMIT 1
) s ON true
ORDER BY p.id, i.group_id
ON CONFLICT (partition_id, group_id) DO NOTHING;

-- name: claim
-- Lease spans of partitions, or consume them at once (autoAck), and return what is in them.
-- Each row: partition, group, how many, lease id, seconds, autoAck, quiet seconds wanted, the span the caller holds in
-- memory already, whose segments it need not be sent, and the offset not to pass. $11: bytes that bodies may have in
-- all; of what comes after them the first row, and the first of each claim, is returned without its body, and nothing
-- else.
WITH claimed AS (
    UPDATE queen.cursors c SET
        lease_start = greatest(c.committed, p.floor_offset),
        lease_end = least(p.next_offset, i.stop, greatest(c.committed, p.floor_offset) + i.want),
        committed = CASE WHEN i.auto_ack
            THEN least(p.next_offset, i.stop, greatest(c.committed, p.floor_offset) + i.want)
            ELSE greatest(c.committed, p.floor_offset) END,
        lease_id = CASE WHEN i.auto_ack THEN NULL ELSE i.lease_id END,
        lease_until = CASE WHEN i.auto_ack THEN NULL ELSE clock_timestamp() + make_interval(secs => i.seconds) END,
        lease_acquired_at = clock_timestamp(),
        total_consumed = c.total_consumed + CASE WHEN i.auto_ack
            THEN least(p.next_offset, i.stop, greatest(c.committed, p.floor_offset) + i.want)
                 - greatest(c.committed, p.floor_offset)
            ELSE 0 END,
        total_batches = c.total_batches + i.auto_ack::integer,
        last_consumed_at = CASE WHEN i.auto_ack THEN clock_timestamp() ELSE c.last_consumed_at END
    FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::uuid[], $5::float8[], $6::boolean[], $7::float8[],
            $8::bigint[], $9::bigint[], $10::bigint[]) WITH ORDINALITY
        AS i (partition_id, group_id, want, lease_id, seconds, auto_ack, quiet, held_from, held_to, stop, slot)
    JOIN queen.partitions p ON p.id = i.partition_id
    WHERE c.partition_id = i.partition_id AND c.group_id = i.group_id
        AND least(p.next_offset, i.stop) > greatest(c.committed, p.floor_offset)
        AND (c.lease_until IS NULL OR c.lease_until <= clock_timestamp())
        AND (i.quiet = 0 OR p.last_at <= clock_timestamp() - make_interval(secs => i.quiet))
    RETURNING i.slot, i.held_from, i.held_to, c.partition_id, c.lease_start, c.lease_end, c.lease_until, c.attempts,
        p.next_offset
)
SELECT r.slot, r.lease_start, r.lease_end, r.lease_until, r.attempts, r.next_offset,
    r.base_offset, r.created_at, CASE WHEN r.sent < $11 THEN r.ids END AS ids,
    CASE WHEN r.sent < $11 THEN r.body END AS body
FROM (
    SELECT k.slot, k.lease_start, k.lease_end, k.lease_until, k.attempts, k.next_offset,
        s.base_offset, s.created_at, s.ids, s.body,
        -- What comes before it, in whatever order the rows come: sorting them would cost every pop. A row takes some
        -- bytes beside its body, too.
        sum(octet_length(s.body) + 400) OVER (ROWS UNBOUNDED PRECEDING) - octet_length(s.body) - 400 AS sent,
        coalesce(lag(octet_length(s.body) + 400) OVER (ROWS UNBOUNDED PRECEDING), 0) AS one_less
    FROM claimed k
    LEFT JOIN LATERAL (
        SELECT g.base_offset, g.created_at, g.ids, g.body FROM queen.segments g
        WHERE g.partition_id = k.partition_id AND g.base_offset < k.lease_end
            AND g.base_offset >= coalesce((SELECT b.base_offset FROM queen.segments b
                WHERE b.partition_id = k.partition_id AND b.base_offset <= k.lease_start
                ORDER BY b.base_offset DESC LIMIT 1), k.lease_start)
        ORDER BY g.base_offset
    ) s ON k.lease_start < k.held_from OR k.lease_end > k.held_to
) r
WHERE r.sent IS NULL OR r.sent - r.one_less < $11 OR r.base_offset <= r.lease_start;

-- name: claim_fresh
-- The same for partitions, in ascending order, that a group without a subscription meets for the first time: the cursor
-- is made as leased. Rows that are not returned have a cursor already, or nothing to offer. $10: as $11 above.
WITH made AS (
    INSERT INTO queen.cursors (partition_id, group_id, committed, lease_id, lease_start, lease_end, lease_until,
        lease_acquired_at, total_consumed, total_batches, last_consumed_at)
    SELECT p.id, i.group_id, CASE WHEN i.auto_ack THEN e.stop ELSE p.floor_offset END,
        CASE WHEN NOT i.auto_ack THEN i.lease_id END, p.floor_offset, e.stop,
        CASE WHEN NOT i.auto_ack THEN clock_timestamp() + make_interval(secs => i.seconds) END, clock_timestamp(),
        CASE WHEN i.auto_ack THEN e.stop - p.floor_offset ELSE 0 END, i.auto_ack::integer,
        CASE WHEN i.auto_ack THEN clock_timestamp() END
    FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::uuid[], $5::float8[], $6::boolean[], $7::float8[])
        AS i (partition_id, group_id, want, lease_id, seconds, auto_ack, quiet)
    JOIN queen.partitions p ON p.id = i.partition_id
    CROSS JOIN LATERAL (SELECT least(p.next_offset, p.floor_offset + i.want) AS stop) e
    WHERE e.stop > p.floor_offset
        AND (i.quiet = 0 OR p.last_at <= clock_timestamp() - make_interval(secs => i.quiet))
    ON CONFLICT (partition_id, group_id) DO NOTHING
    RETURNING partition_id, group_id, lease_start, lease_end, lease_until, attempts
)
SELECT r.partition_id, r.group_id, r.lease_start, r.lease_end, r.lease_until, r.attempts, r.next_offset,
    r.base_offset, r.created_at, CASE WHEN r.sent < $10 THEN r.ids END AS ids,
    CASE WHEN r.sent < $10 THEN r.body END AS body
FROM (
    SELECT k.partition_id, k.group_id, k.lease_start, k.lease_end, k.lease_until, k.attempts, p.next_offset,
        s.base_offset, s.created_at, s.ids, s.body,
        sum(octet_length(s.body) + 400) OVER (ROWS UNBOUNDED PRECEDING) - octet_length(s.body) - 400 AS sent,
        coalesce(lag(octet_length(s.body) + 400) OVER (ROWS UNBOUNDED PRECEDING), 0) AS one_less
    FROM made k
    JOIN queen.partitions p ON p.id = k.partition_id
    LEFT JOIN LATERAL (
        SELECT g.base_offset, g.created_at, g.ids, g.body FROM queen.segments g
        WHERE g.partition_id = k.partition_id AND g.base_offset < k.lease_end
            AND g.base_offset >= coalesce((SELECT b.base_offset FROM queen.segments b
                WHERE b.partition_id = k.partition_id AND b.base_offset <= k.lease_start
                ORDER BY b.base_offset DESC LIMIT 1), k.lease_start)
        ORDER BY g.base_offset
    -- By where a partition stands among the arguments: a join would compare each with each.
    ) s ON k.lease_start < ($8::bigint[])[width_bucket(k.partition_id, $1::bigint[])]
        OR k.lease_end > ($9::bigint[])[width_bucket(k.partition_id, $1::bigint[])]
) r
WHERE r.sent IS NULL OR r.sent - r.one_less < $10 OR r.base_offset <= r.lease_start;

-- name: segments_between
-- The segments that overlap a span of offsets: the first of them, up to $4 bytes, and the next without its body.
SELECT r.base_offset, r.created_at, CASE WHEN r.sent < $4 THEN r.ids END AS ids,
    CASE WHEN r.sent < $4 THEN r.body END AS body
FROM (
    SELECT g.base_offset, g.created_at, g.ids, g.body,
        sum(octet_length(g.body) + 400) OVER (ORDER BY g.base_offset) - octet_length(g.body) - 400 AS sent,
        coalesce(lag(octet_length(g.body) + 400) OVER (ORDER BY g.base_offset), 0) AS one_less
    FROM queen.segments g
    WHERE g.partition_id = $1 AND g.base_offset < $3
        AND g.base_offset >= coalesce((SELECT b.base_offset FROM queen.segments b
            WHERE b.partition_id = $1 AND b.base_offset <= $2 ORDER BY b.base_offset DESC LIMIT 1), $2)
) r
WHERE r.sent - r.one_less < $4
ORDER BY r.base_offset;

-- name: unclaim
-- Take back claims, leased or consumed at once, that were not delivered. When another session has claimed what comes after
-- meanwhile, only those are taken back that must not be skipped ($5): they may be delivered twice, but are not lost.
UPDATE queen.cursors c SET
    committed = i.lease_start,
    lease_id = CASE WHEN c.lease_start = i.lease_start THEN NULL ELSE c.lease_id END,
    lease_until = CASE WHEN c.lease_start = i.lease_start THEN NULL ELSE c.lease_until END,
    total_consumed = c.total_consumed - (c.committed - i.lease_start)
FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[], $5::boolean[])
    AS i (partition_id, group_id, lease_start, lease_end, needed)
WHERE c.partition_id = i.partition_id AND c.group_id = i.group_id AND c.committed >= i.lease_start
    AND ((c.lease_start = i.lease_start AND c.lease_end = i.lease_end) OR i.needed);

-- name: shorten_leases
-- Let leases end earlier than they were claimed, because the messages at their end were deleted.
UPDATE queen.cursors c SET lease_end = i.lease_end
FROM unnest($1::bigint[], $2::integer[], $3::uuid[], $4::bigint[]) AS i (partition_id, group_id, lease_id, lease_end)
WHERE c.partition_id = i.partition_id AND c.group_id = i.group_id AND c.lease_id = i.lease_id;

-- name: why_unclaimed
-- What keeps partitions from being claimed: a lease, a quiet period, or that nothing is there.
SELECT i.slot, p.id IS NOT NULL AS present, c.partition_id IS NOT NULL AS has_cursor,
    greatest(0, p.next_offset - greatest(c.committed, p.floor_offset)) AS available,
    extract(epoch FROM c.lease_until - clock_timestamp())::float8 AS held_for,
    extract(epoch FROM p.last_at + make_interval(secs => i.quiet) - clock_timestamp())::float8 AS quiet_for
FROM unnest($1::bigint[], $2::integer[], $3::float8[]) WITH ORDINALITY AS i (partition_id, group_id, quiet, slot)
LEFT JOIN queen.partitions p ON p.id = i.partition_id
LEFT JOIN queen.cursors c ON c.partition_id = i.partition_id AND c.group_id = i.group_id;

-- name: conflation_segments
-- For claims of groups with conflation: where the partition ends, and the last segment of each that begins before an
-- offset ($3), if the group has yet to consume something of it, and no other consumer has a lease.
SELECT i.slot, p.next_offset, greatest(c.committed, p.floor_offset) AS first_offset, s.base_offset, s.created_at, s.ids,
    s.body
FROM unnest($1::bigint[], $2::integer[], $3::bigint[]) WITH ORDINALITY AS i (partition_id, group_id, stop, slot)
JOIN queen.partitions p ON p.id = i.partition_id
JOIN queen.cursors c ON c.partition_id = i.partition_id AND c.group_id = i.group_id
LEFT JOIN LATERAL (
    SELECT g.base_offset, g.count, g.created_at, g.ids, g.body FROM queen.segments g
    WHERE g.partition_id = i.partition_id AND g.base_offset < least(p.next_offset, i.stop)
    ORDER BY g.base_offset DESC LIMIT 1
) s ON s.base_offset + s.count > greatest(c.committed, p.floor_offset)
    AND (c.lease_until IS NULL OR c.lease_until <= clock_timestamp());

-- name: conflate
-- Have groups pass over what comes before the newest message of a partition; how many messages each passed over.
UPDATE queen.cursors c SET committed = i.newest
FROM unnest($1::bigint[], $2::integer[], $3::bigint[]) WITH ORDINALITY AS i (partition_id, group_id, newest, slot)
JOIN queen.partitions p ON p.id = i.partition_id
JOIN queen.cursors o ON o.partition_id = i.partition_id AND o.group_id = i.group_id
WHERE c.partition_id = i.partition_id AND c.group_id = i.group_id AND c.committed < i.newest
    AND (c.lease_until IS NULL OR c.lease_until <= clock_timestamp())
RETURNING i.slot, greatest(0, i.newest - greatest(o.committed, p.floor_offset)) AS passed;

-- name: ripe_until
-- For queues with delayed processing: the first offset of each span that is still too young, and for how long. A group may
-- stand in the middle of a segment that is.
SELECT i.slot, greatest(y.base_offset, f.first) AS first_offset,
    extract(epoch FROM y.created_at + make_interval(secs => i.delay) - clock_timestamp())::float8 AS ripe_in
FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::float8[]) WITH ORDINALITY
    AS i (partition_id, group_id, want, delay, slot)
JOIN queen.partitions p ON p.id = i.partition_id
JOIN queen.cursors c ON c.partition_id = i.partition_id AND c.group_id = i.group_id
CROSS JOIN LATERAL (SELECT greatest(c.committed, p.floor_offset) AS first) f
JOIN LATERAL (
    SELECT s.base_offset, s.created_at FROM queen.segments s
    WHERE s.partition_id = i.partition_id AND s.base_offset < f.first + i.want
        AND s.base_offset >= coalesce((SELECT b.base_offset FROM queen.segments b
            WHERE b.partition_id = i.partition_id AND b.base_offset <= f.first ORDER BY b.base_offset DESC LIMIT 1), f.first)
        AND s.base_offset + s.count > f.first AND s.created_at > clock_timestamp() - make_interval(secs => i.delay)
    ORDER BY s.base_offset LIMIT 1
) y ON true;

-- name: expire
-- For queues with a ttl: what is older is not delivered any more.
UPDATE queen.partitions p SET floor_offset = a.alive
FROM unnest($1::bigint[], $2::float8[]) AS i (partition_id, ttl)
JOIN queen.partitions o ON o.id = i.partition_id
CROSS JOIN LATERAL (
    SELECT coalesce((SELECT s.base_offset FROM queen.segments s
        WHERE s.partition_id = o.id AND s.base_offset >= o.floor_offset
            AND s.created_at > clock_timestamp() - make_interval(secs => i.ttl)
        ORDER BY s.base_offset LIMIT 1), o.next_offset) AS alive
) a
WHERE p.id = o.id AND a.alive > p.floor_offset AND a.alive <= p.next_offset;

-- name: ready_partitions
-- A page of a queue's partitions, by id, those that have something for a group; leased ones too, with how long they stay
-- so. The page is cut by (queue, id), the order of its index: by id alone, other queues' partitions would be read too.
SELECT p.id, p.next_offset - greatest(p.floor_offset, coalesce(c.committed, 0)) AS available,
    c.partition_id IS NOT NULL AS has_cursor,
    coalesce(extract(epoch FROM c.lease_until - clock_timestamp()), 0)::float8 AS held_for
FROM (
    SELECT * FROM queen.partitions
    WHERE (queue_id, id) > ($1, $3) AND queue_id <= $1 ORDER BY queue_id, id LIMIT $4
) p
LEFT JOIN LATERAL (
    SELECT * FROM queen.cursors WHERE partition_id = p.id AND group_id = $2 OFFSET 0
) c ON true
WHERE p.next_offset > greatest(p.floor_offset, coalesce(c.committed, 0))
    AND (c.partition_id IS NOT NULL OR $5::timestamptz IS NULL OR p.last_at > $5);

-- name: ready_among
-- Those of the partitions, where a group has been before, that have something for it; leased ones too, with how long
-- they stay so.
SELECT p.id, p.next_offset - greatest(p.floor_offset, coalesce(c.committed, 0)) AS available,
    coalesce(extract(epoch FROM c.lease_until - clock_timestamp()), 0)::float8 AS held_for
FROM unnest($1::bigint[]) AS i (id)
JOIN queen.partitions p ON p.id = i.id
LEFT JOIN LATERAL (
    SELECT * FROM queen.cursors WHERE partition_id = p.id AND group_id = $2 OFFSET 0
) c ON true
WHERE p.next_offset > greatest(p.floor_offset, coalesce(c.committed, 0));

-- name: partition_page_end
-- The last id of a page of a queue's partitions.
SELECT max(id) AS last_id, count(*) AS found
FROM (
    SELECT id FROM queen.partitions
    WHERE (queue_id, id) > ($1, $2) AND queue_id <= $1 ORDER BY queue_id, id LIMIT $3
) p;

-- name: subscription
-- When a group subscribed to a queue, or to one of its partitions.
SELECT partition_name, mode, since, coalesce(conflation, false) AS conflation FROM queen.subscriptions
WHERE group_id = $1 AND queue_name = $2;

-- name: declare_conflation
-- Subscribe a group to a queue with conflation, unless it is known there already; from the beginning when no time is
-- given. Returns the number of the change.
WITH made AS (
    INSERT INTO queen.subscriptions (group_id, queue_name, mode, since, conflation)
    SELECT $1, $2, $3, coalesce($4, CASE $3 WHEN 'all' THEN 'epoch'::timestamptz ELSE clock_timestamp() END), true
    WHERE NOT EXISTS (
        SELECT FROM queen.queues q JOIN queen.partitions p ON p.queue_id = q.id
        JOIN queen.cursors c ON c.partition_id = p.id AND c.group_id = $1
        WHERE q.name = $2
    )
    ON CONFLICT (group_id, queue_name, partition_name) DO NOTHING
    RETURNING group_id
)
INSERT INTO queen.changes (kind, name)
SELECT 'g', g.name FROM made m JOIN queen.groups g ON g.id = m.group_id RETURNING xid;

-- name: subscribe
-- Record a subscription, unless the group has one already; `now` when no time is given. Returns the number of the change.
WITH made AS (
    INSERT INTO queen.subscriptions (group_id, queue_name, partition_name, mode, since)
    VALUES ($1, $2, $3, $4, coalesce($5, clock_timestamp()))
    ON CONFLICT (group_id, queue_name, partition_name) DO NOTHING
    RETURNING group_id
)
INSERT INTO queen.changes (kind, name)
SELECT 'g', g.name FROM made m JOIN queen.groups g ON g.id = m.group_id RETURNING xid;
