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

-- name: groups_of_lease
-- The consumer groups that hold a lease on its first partition.
SELECT g.name FROM queen.cursors c JOIN queen.groups g ON g.id = c.group_id
WHERE c.partition_id = $1 AND c.lease_id = $2;
