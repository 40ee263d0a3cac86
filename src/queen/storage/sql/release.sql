-- Giving leases up before they run out.

-- name: release_leases
-- End live leases whose holder is gone: nothing is consumed, no retry is counted, and what they held can be had at once.
UPDATE queen.cursors c SET lease_id = NULL, lease_until = NULL
FROM unnest($1::bigint[], $2::uuid[]) AS i (partition_id, lease_id)
JOIN queen.partitions p ON p.id = i.partition_id
WHERE c.partition_id = i.partition_id AND c.lease_id = i.lease_id AND c.lease_until > clock_timestamp()
RETURNING p.queue_id, c.partition_id, c.group_id, i.lease_id::text AS lease_id,
    p.next_offset - c.committed AS available;
