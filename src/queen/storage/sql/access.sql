-- The queues of a request of a limited token, where it does not name them.

-- name: queues_of_batch
-- The queues that the messages of a staged batch are for; an empty name stands for topics.
SELECT DISTINCT CASE WHEN partition_id = 0 THEN '' ELSE queue END AS queue
FROM queen.stages
WHERE run = $1 AND batch = $2;

-- name: queues_of_stream
-- The queues that a streaming query reads and writes.
SELECT source_queue, sink_queue FROM queen.stream_queries WHERE public_id = $1;

-- name: queues_of_stream_named
-- The same of a query by its name.
SELECT source_queue, sink_queue FROM queen.stream_queries WHERE name = $1;
