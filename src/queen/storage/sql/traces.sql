-- Traces: what consumers said about messages.

-- name: insert_trace
-- Store a trace under its names.
WITH trace AS (
    INSERT INTO queen.traces (queue_id, partition_id, message_offset, transaction_id, group_name, event_type, data,
        worker_id)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
    RETURNING id, public_id, created_at
), named AS (
    INSERT INTO queen.trace_names (name, trace_id, created_at)
    SELECT n.name, trace.id, trace.created_at FROM trace, unnest($9::text[]) AS n (name)
)
SELECT public_id FROM trace;

-- name: traces_at
-- The traces of one message, oldest first; once they have $5 bytes, the rest without data.
SELECT t.public_id, t.event_type, t.group_name,
    CASE WHEN sum(octet_length(t.data)) OVER (ORDER BY t.id ROWS UNBOUNDED PRECEDING) - octet_length(t.data) < $5::bigint
        THEN t.data END AS data, t.worker_id, t.created_at,
    ARRAY(SELECT n.name FROM queen.trace_names n WHERE n.trace_id = t.id ORDER BY n.name) AS names
FROM (
    SELECT * FROM queen.traces WHERE partition_id = $1 AND message_offset = $2
    ORDER BY id LIMIT $3::bigint OFFSET $4::bigint
) t
ORDER BY t.id;

-- name: count_traces_at
-- How many traces a message has.
SELECT count(*) AS total FROM queen.traces WHERE partition_id = $1 AND message_offset = $2;

-- name: traced_offset
-- The newest message of a partition that was traced under a transaction id, for messages that are gone themselves.
SELECT max(message_offset) AS message_offset FROM queen.traces WHERE partition_id = $1 AND transaction_id = $2;

-- name: traces_named
-- The traces of a name, oldest first; once they have $4 bytes, the rest without data.
SELECT t.public_id, t.partition_id, t.message_offset, t.transaction_id, t.event_type, t.group_name,
    CASE WHEN sum(octet_length(t.data)) OVER (ORDER BY t.id ROWS UNBOUNDED PRECEDING) - octet_length(t.data) < $4::bigint
        THEN t.data END AS data,
    t.worker_id, t.created_at, p.name AS partition_name, q.name AS queue_name,
    ARRAY(SELECT n.name FROM queen.trace_names n WHERE n.trace_id = t.id ORDER BY n.name) AS names
FROM (
    SELECT trace_id FROM queen.trace_names WHERE name = $1 ORDER BY trace_id LIMIT $2::bigint OFFSET $3::bigint
) chosen
JOIN queen.traces t ON t.id = chosen.trace_id
LEFT JOIN queen.partitions p ON p.id = t.partition_id
LEFT JOIN queen.queues q ON q.id = p.queue_id
ORDER BY t.id;

-- name: count_traces_named
-- How many traces have a name.
SELECT count(*) AS total FROM queen.trace_names WHERE name = $1;

-- name: trace_names_page
-- Names of traces with $3 in them, the one used last first, with how many traces and messages each has. There is always
-- a row.
WITH names AS MATERIALIZED (
    SELECT name, max(trace_id) AS last_id, count(*) AS traces FROM queen.trace_names
    WHERE $3::text = '' OR position(lower($3) IN lower(name)) > 0
    GROUP BY name
)
SELECT t.total, c.name, c.traces, m.messages, l.created_at AS last_seen
FROM (SELECT count(*) AS total FROM names) t
LEFT JOIN LATERAL (SELECT * FROM names ORDER BY last_id DESC LIMIT $1::bigint OFFSET $2::bigint) c ON true
LEFT JOIN queen.traces l ON l.id = c.last_id
LEFT JOIN LATERAL (
    SELECT count(DISTINCT (t.partition_id, t.message_offset)) AS messages
    FROM queen.trace_names n JOIN queen.traces t ON t.id = n.trace_id WHERE n.name = c.name
) m ON true
ORDER BY c.last_id DESC;

-- name: delete_traces_of
-- The traces of messages.
DELETE FROM queen.traces WHERE partition_id = $1 AND message_offset = ANY($2::bigint[]);
