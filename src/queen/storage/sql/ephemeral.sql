-- Ephemeral queues. Changes of one queue are serialized: each transaction begins with its ring.

-- name: ephemeral_open
-- Lock the ring of a queue ($1), made if there is none with an epoch ($2); and what the queue was declared with.
WITH ring AS (
    INSERT INTO queen.ephemeral_rings AS r (queue, epoch) VALUES ($1, $2)
    ON CONFLICT (queue) DO UPDATE SET used_at = clock_timestamp()
    RETURNING r.epoch, r.length, r.bytes
)
SELECT r.epoch, r.length, r.bytes, (SELECT options::text FROM queen.ephemeral_queues WHERE name = $1) AS options FROM ring r;

-- name: ephemeral_drop
-- Remove messages of a queue ($1): those older than some seconds ($2), the oldest so many ($3), or some ($4); how many.
WITH doomed AS MATERIALIZED (
    SELECT seq FROM queen.ephemeral_messages WHERE queue = $1 AND $2::float8 IS NOT NULL
        AND pushed_at < clock_timestamp() - make_interval(secs => $2::float8)
    UNION (SELECT seq FROM queen.ephemeral_messages WHERE queue = $1 ORDER BY seq LIMIT coalesce($3::bigint, 0))
    UNION SELECT unnest($4::bigint[])
), gone AS (
    DELETE FROM queen.ephemeral_messages m USING doomed d WHERE m.queue = $1 AND m.seq = d.seq
    RETURNING m.seq, octet_length(m.payload) AS bytes
), leases AS (
    DELETE FROM queen.ephemeral_leases l USING doomed d WHERE l.queue = $1 AND l.seq = d.seq
), ring AS (
    UPDATE queen.ephemeral_rings SET length = length - (SELECT count(*) FROM gone),
        bytes = bytes - (SELECT coalesce(sum(g.bytes), 0) FROM gone g)
    WHERE queue = $1
)
SELECT count(*) AS messages FROM gone;

-- name: ephemeral_push
-- Append messages ($3) to a partition ($2) of a queue ($1).
WITH ring AS (
    UPDATE queen.ephemeral_rings SET next_seq = next_seq + cardinality($3::text[]), length = length + cardinality($3::text[]),
        bytes = bytes + (SELECT sum(octet_length(p)) FROM unnest($3::text[]) AS p)
    WHERE queue = $1 RETURNING next_seq - cardinality($3::text[]) AS first
)
INSERT INTO queen.ephemeral_messages (queue, seq, partition, payload)
SELECT $1, r.first + m.place - 1, $2, m.payload FROM ring r, unnest($3::text[]) WITH ORDINALITY AS m (payload, place);

-- name: ephemeral_join
-- A group ($2) consumes a queue ($1).
INSERT INTO queen.ephemeral_groups (queue, name) VALUES ($1, $2) ON CONFLICT DO NOTHING;

-- name: ephemeral_ready
-- Messages of a queue ($1), or of a partition ($3), that a group ($2) may have now, the oldest first, at most so many ($4):
-- those that it never had, and those whose lease is over, with the attempts there were; no more once they have $5 bytes.
SELECT * FROM (
SELECT r.*, sum(octet_length(r.payload)) OVER (ORDER BY r.seq ROWS UNBOUNDED PRECEDING) - octet_length(r.payload) AS before
FROM (
SELECT m.seq, m.partition, m.payload, coalesce(l.attempts, 0) AS attempts
FROM queen.ephemeral_messages m
LEFT JOIN queen.ephemeral_cursors c ON c.queue = m.queue AND c.group_name = $2 AND c.partition = m.partition
LEFT JOIN queen.ephemeral_leases l ON l.queue = m.queue AND l.group_name = $2 AND l.seq = m.seq
WHERE m.queue = $1 AND ($3::text IS NULL OR m.partition = $3)
    AND (m.seq >= coalesce(c.next_seq, 0) OR l.until <= clock_timestamp())
ORDER BY m.seq LIMIT $4
) r
) s
WHERE before < $5::bigint ORDER BY seq;

-- name: ephemeral_next
-- In how many seconds the next lease of a group ($2) on a queue ($1) is over; no row: there is none.
SELECT greatest(0, extract(epoch FROM min(until) - clock_timestamp()))::float8 AS seconds FROM queen.ephemeral_leases
WHERE queue = $1 AND group_name = $2 HAVING count(*) > 0;

-- name: ephemeral_take
-- A group ($2) is past messages ($3, of the partitions $4) of a queue ($1); those that are leased ($5) until some seconds
-- from now ($6) come again, the leases of the others are over.
WITH given AS (
    SELECT * FROM unnest($3::bigint[], $4::text[]) AS i (seq, partition)
), moved AS (
    INSERT INTO queen.ephemeral_cursors AS c (queue, group_name, partition, next_seq)
    SELECT $1, $2, partition, max(seq) + 1 FROM given GROUP BY partition
    ON CONFLICT (queue, group_name, partition) DO UPDATE SET next_seq = greatest(c.next_seq, excluded.next_seq)
), ended AS (
    DELETE FROM queen.ephemeral_leases l USING given i
    WHERE NOT $5 AND l.queue = $1 AND l.group_name = $2 AND l.seq = i.seq
)
INSERT INTO queen.ephemeral_leases AS l (queue, group_name, seq, until, attempts)
SELECT $1, $2, seq, clock_timestamp() + make_interval(secs => $6), 1 FROM given WHERE $5
ON CONFLICT (queue, group_name, seq) DO UPDATE SET until = excluded.until, attempts = l.attempts + 1;

-- name: ephemeral_leases
-- The leases of a group ($2) on messages ($3) of a queue ($1).
SELECT seq, attempts FROM queen.ephemeral_leases WHERE queue = $1 AND group_name = $2 AND seq = ANY ($3::bigint[]);

-- name: ephemeral_settle
-- End leases of a group ($2) on messages of a queue ($1): for good ($3), or so that they come again ($4).
WITH again AS (
    UPDATE queen.ephemeral_leases SET until = clock_timestamp() - interval '1 ms'
    WHERE queue = $1 AND group_name = $2 AND seq = ANY ($4::bigint[])
)
DELETE FROM queen.ephemeral_leases WHERE queue = $1 AND group_name = $2 AND seq = ANY ($3::bigint[]);

-- name: ephemeral_done
-- Which of some messages ($2) of a queue ($1) every group is done with.
SELECT m.seq FROM queen.ephemeral_messages m
WHERE m.queue = $1 AND m.seq = ANY ($2::bigint[])
    AND NOT EXISTS (SELECT FROM queen.ephemeral_leases l WHERE l.queue = m.queue AND l.seq = m.seq)
    AND NOT EXISTS (
        SELECT FROM queen.ephemeral_groups g
        LEFT JOIN queen.ephemeral_cursors c
            ON c.queue = g.queue AND c.group_name = g.name AND c.partition = m.partition
        WHERE g.queue = m.queue AND coalesce(c.next_seq, 0) <= m.seq
    );

-- name: ephemeral_declare
-- Declare a queue.
INSERT INTO queen.ephemeral_queues (name, options) VALUES ($1, $2::text::jsonb)
ON CONFLICT (name) DO UPDATE SET options = excluded.options;

-- name: ephemeral_lock
-- Lock the ring of a queue; no row: it has none.
SELECT queue FROM queen.ephemeral_rings WHERE queue = $1 FOR UPDATE;

-- name: ephemeral_clear
-- Remove the ring of a queue with all that belongs to it, its groups too if $2; how many messages it had.
WITH messages AS (DELETE FROM queen.ephemeral_messages WHERE queue = $1),
    leases AS (DELETE FROM queen.ephemeral_leases WHERE queue = $1),
    cursors AS (DELETE FROM queen.ephemeral_cursors WHERE queue = $1),
    groups AS (DELETE FROM queen.ephemeral_groups WHERE queue = $1 AND $2)
DELETE FROM queen.ephemeral_rings WHERE queue = $1 RETURNING length AS messages;

-- name: ephemeral_undeclare
-- Remove what a queue was declared with.
DELETE FROM queen.ephemeral_queues WHERE name = $1 RETURNING name;

-- name: ephemeral_one
-- One ephemeral queue.
SELECT coalesce(q.name, r.queue) AS queue, q.name IS NOT NULL AS declared, q.options::text AS options,
    coalesce(r.length, 0) AS length, coalesce(r.bytes, 0) AS bytes
FROM queen.ephemeral_queues q FULL JOIN queen.ephemeral_rings r ON r.queue = q.name
WHERE coalesce(q.name, r.queue) = $1;

-- name: ephemeral_page
-- A page ($2, $3) of the ephemeral queues with a text ($1) in their names (empty: any), by name; and how many there are.
SELECT coalesce(q.name, r.queue) AS queue, q.name IS NOT NULL AS declared, q.options::text AS options,
    coalesce(r.length, 0) AS length, coalesce(r.bytes, 0) AS bytes, count(*) OVER () AS total
FROM queen.ephemeral_queues q FULL JOIN queen.ephemeral_rings r ON r.queue = q.name
WHERE $1::text = '' OR position(lower($1) IN lower(coalesce(q.name, r.queue))) > 0
ORDER BY 1 LIMIT $2 OFFSET $3;

-- name: ephemeral_partitions
-- The partitions of a queue that have messages.
SELECT partition, count(*) AS length FROM queen.ephemeral_messages WHERE queue = $1 GROUP BY partition ORDER BY partition;

-- name: ephemeral_group_stats
-- The groups of a queue: how many messages each has yet to be given, and how many of those it was given are leased.
SELECT g.name, (
        SELECT count(*) FROM queen.ephemeral_messages m
        LEFT JOIN queen.ephemeral_cursors c ON c.queue = m.queue AND c.group_name = g.name AND c.partition = m.partition
        WHERE m.queue = g.queue AND m.seq >= coalesce(c.next_seq, 0)
    ) AS pending,
    (SELECT count(*) FROM queen.ephemeral_leases l WHERE l.queue = g.queue AND l.group_name = g.name) AS leased
FROM queen.ephemeral_groups g WHERE g.queue = $1 ORDER BY g.name;

-- name: ephemeral_collect
-- Forget queues that were not declared, and not used for some seconds ($1), so many at once ($2).
WITH idle AS MATERIALIZED (
    SELECT queue FROM queen.ephemeral_rings r
    WHERE used_at < clock_timestamp() - make_interval(secs => $1)
        AND NOT EXISTS (SELECT FROM queen.ephemeral_queues q WHERE q.name = r.queue)
    LIMIT $2 FOR UPDATE SKIP LOCKED
), messages AS (DELETE FROM queen.ephemeral_messages m USING idle i WHERE m.queue = i.queue),
    leases AS (DELETE FROM queen.ephemeral_leases m USING idle i WHERE m.queue = i.queue),
    cursors AS (DELETE FROM queen.ephemeral_cursors m USING idle i WHERE m.queue = i.queue),
    groups AS (DELETE FROM queen.ephemeral_groups m USING idle i WHERE m.queue = i.queue)
DELETE FROM queen.ephemeral_rings r USING idle i WHERE r.queue = i.queue RETURNING r.queue;
