-- Several shards: which one this is, and what lives elsewhere.

-- name: shard_state
-- Which shard this is, which ones take new names, and whether something is on its way here.
SELECT s.number, s.layout, s.next_layout, s.version,
    EXISTS (SELECT FROM queen.placements WHERE arriving) AS arriving
FROM queen.shard s;

-- name: placement
-- The placement of a name, if this shard has a row for it.
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
-- Claim keys of namespaces for shards; returns the owner of each, and since how many seconds.
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
-- Give a key to another shard, if its owner has not changed.
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

-- name: shard_number
-- Which shard this is.
SELECT number FROM queen.shard;

-- name: shard_layout
-- The shards that take new names.
SELECT layout FROM queen.shard;

-- name: shard_lock_setup
-- Only one session at a time makes this database a shard.
SELECT pg_advisory_xact_lock($1);

-- name: shard_is_used
-- Whether there are queues or topics.
SELECT EXISTS (SELECT FROM queen.queues) OR EXISTS (SELECT FROM queen.topics);

-- name: shard_create
-- This database is this shard from now on.
INSERT INTO queen.shard (number, layout) VALUES ($1, $2);

-- name: shard_remove_other_nodes
-- Drop the reservations of item ids that another shard ($2 of $1) would make.
DELETE FROM queen.topic_nodes WHERE node % $1 <> $2;

-- name: shard_close_nodes
-- Servers that knew of one shard only may go on for so many milliseconds with the ids they have reserved.
UPDATE queen.topic_nodes SET upto_ms = extract(epoch FROM clock_timestamp()) * 1000 + $1;

-- name: shard_begin_ids
-- Have every identity column count from the range of this shard ($1): $2 bits are counted in an integer, $3 in a bigint.
SELECT setval(pg_get_serial_sequence(format('queen.%I', table_name), column_name),
    ($1::bigint << CASE WHEN data_type = 'integer' THEN $2::integer ELSE $3::integer END) + 1, false)
FROM information_schema.columns WHERE table_schema = 'queen' AND is_identity = 'YES';

-- name: shard_refuse_items
-- Refuse items of topics that have left this shard.
CREATE OR REPLACE TRIGGER refuse_left AFTER INSERT ON queen.topic_items REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION queen.refuse_items_of_left_topics();

-- name: shard_refuse_traces
-- Refuse traces of queues that have left this shard.
CREATE OR REPLACE TRIGGER refuse_left AFTER INSERT ON queen.traces
    FOR EACH ROW EXECUTE FUNCTION queen.refuse_traces_of_left_queues();

-- name: shard_queue_id
-- The id of a queue.
SELECT id FROM queen.queues WHERE name = $1;

-- name: shard_topic_id
-- The id of a topic, by its namespace and name with a line break between them.
SELECT t.id FROM queen.topics t JOIN queen.topic_namespaces n ON n.id = t.namespace_id
WHERE n.name || E'\n' || t.name = $1;

-- name: shard_queue_names
-- Every queue on this shard.
SELECT name FROM queen.queues ORDER BY name;

-- name: shard_topic_names
-- Every topic on this shard: its namespace and name with a line break between them.
SELECT n.name || E'\n' || t.name AS name FROM queen.topics t JOIN queen.topic_namespaces n ON n.id = t.namespace_id
ORDER BY n.name, t.name;

-- name: shard_namespace_names
-- Every namespace of which this shard keeps a quota or keys.
SELECT name FROM queen.topic_namespaces UNION SELECT namespace FROM queen.topic_key_claims;

-- name: shard_sizes
-- Whether this shard takes new names, and how much is on it.
SELECT number = ANY (layout) AS taking, (SELECT count(*) FROM queen.queues) AS queues,
    (SELECT count(*) FROM queen.topics) AS topics,
    (SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'queen' AND c.relkind = 'r')::bigint AS bytes
FROM queen.shard;

-- name: layout_prepare
-- New names are made only where the layout and the next one agree.
UPDATE queen.shard SET next_layout = $1, version = version + 1;

-- name: layout_change
-- The layout counts.
UPDATE queen.shard SET layout = $1, next_layout = NULL, version = version + 1;

-- name: layout_placement
-- Record on which shard a name lives, unless a move of it is arriving here.
INSERT INTO queen.placements AS p (kind, name, shard) VALUES ($1, $2, $3)
ON CONFLICT (kind, name) DO UPDATE SET shard = excluded.shard, move_id = NULL WHERE NOT p.arriving;

-- name: namespace_quota
-- The quota of a namespace.
SELECT quota_per_minute FROM queen.topic_namespaces WHERE name = $1;

-- name: namespace_set_quota
-- Keep the quota of a namespace; no quota leaves the one that is known.
INSERT INTO queen.topic_namespaces AS n (name, quota_per_minute) VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE SET quota_per_minute = coalesce(excluded.quota_per_minute, n.quota_per_minute);

-- name: namespace_key_claims
-- Whose the idempotency keys of a namespace are, those from before there were claims among them.
SELECT namespace, key, shard, claimed_at FROM queen.topic_key_claims WHERE namespace = $1
UNION ALL
SELECT n.name, k.key, s.number, k.created_at
FROM queen.topic_namespaces n JOIN queen.topic_keys k ON k.namespace_id = n.id CROSS JOIN queen.shard s
WHERE n.name = $1;

-- name: namespace_save_key_claim
-- Keep a claim, unless the key is claimed already.
INSERT INTO queen.topic_key_claims (namespace, key, shard, claimed_at) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING;

-- name: shard_inventory
-- What lives on this shard, and how much room its database takes.
SELECT (SELECT count(*) FROM queen.queues) AS queues, (SELECT count(*) FROM queen.partitions) AS partitions,
    (SELECT count(*) FROM queen.topics) AS topics, pg_database_size(current_database()) AS bytes;
