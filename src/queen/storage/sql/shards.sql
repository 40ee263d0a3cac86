-- Several shards: which one this is, and what lives elsewhere.

-- name: shard_state
-- Which shard this is, which ones take new names, and whether something is on its way here.
SELECT s.number, s.layout, s.next_layout, s.version,
    EXISTS (SELECT FROM queen.placements WHERE arriving) AS arriving
FROM queen.shard s;

-- name: placement
-- Where a name lives that this shard has something to say about.
SELECT shard, move_id, arriving FROM queen.placements WHERE kind = $1 AND name = $2;

-- name: arrivals
-- What is on its way here, and from where.
SELECT kind, name, shard, move_id FROM queen.placements WHERE arriving;

-- name: complete_move
-- Store what a move has brought, once it has left the other shard for good.
SELECT queen.complete_move($1) AS completed;

-- name: foreign_partitions
-- Partitions here that another shard has made.
SELECT id FROM queen.partitions WHERE id < $1 OR id >= $2 ORDER BY id;

-- name: claim_topic_keys
-- Claim keys of namespaces for shards; says whose each one is, and for how long it has been.
WITH made AS (
    INSERT INTO queen.topic_key_claims AS c (namespace, key, shard)
    SELECT i.namespace, i.key, CASE
        -- A key that was used here before there were claims is this shard's own.
        WHEN (SELECT k.item_id FROM queen.topic_keys k WHERE k.key = i.key
            AND k.namespace_id = (SELECT id FROM queen.topic_namespaces WHERE name = i.namespace)) IS NOT NULL
        THEN coalesce((SELECT number FROM queen.shard), i.shard) ELSE i.shard END
    FROM unnest($1::text[], $2::text[], $3::integer[]) AS i (namespace, key, shard)
    ORDER BY i.namespace, i.key
    ON CONFLICT DO NOTHING RETURNING c.namespace, c.key, c.shard
)
SELECT namespace, key, shard, 0::float8 AS age FROM made
UNION ALL
SELECT c.namespace, c.key, c.shard, extract(epoch FROM clock_timestamp() - c.claimed_at)::float8
FROM unnest($1::text[], $2::text[]) AS i (namespace, key)
JOIN queen.topic_key_claims c ON c.namespace = i.namespace AND c.key = i.key;

-- name: take_over_topic_key
-- Give a key to another shard, if it still is whose it was believed to be.
UPDATE queen.topic_key_claims SET shard = $4, claimed_at = clock_timestamp()
WHERE namespace = $1 AND key = $2 AND shard = $3 RETURNING shard;

-- name: topic_key_items
-- The items that were enqueued with keys, by the names of their namespaces.
SELECT i.namespace, k.key, k.item_id FROM unnest($1::text[], $2::text[]) AS i (namespace, key)
CROSS JOIN LATERAL (
    SELECT key, item_id FROM queen.topic_keys WHERE key = i.key
        AND namespace_id = (SELECT id FROM queen.topic_namespaces WHERE name = i.namespace) OFFSET 0
) k;

-- name: forget_topic_key_claims
-- Some of the claims of keys that are older than so many seconds.
DELETE FROM queen.topic_key_claims WHERE (namespace, key) IN (
    SELECT namespace, key FROM queen.topic_key_claims
    WHERE claimed_at < clock_timestamp() - make_interval(secs => $1) ORDER BY claimed_at LIMIT $2
) RETURNING 1;

-- name: holds_queue
-- Whether a queue is here.
SELECT 1 FROM queen.queues WHERE name = $1;

-- name: holds_topic
-- Whether a topic is here.
SELECT 1 FROM queen.topics t JOIN queen.topic_namespaces n ON n.id = t.namespace_id WHERE n.name = $1 AND t.name = $2;

-- name: holds_namespace
-- Whether the quota or the keys of a namespace are kept here.
SELECT 1 FROM queen.topic_namespaces WHERE name = $1 AND quota_per_minute IS NOT NULL
UNION ALL (SELECT 1 FROM queen.topic_key_claims WHERE namespace = $1 LIMIT 1);
