-- Topics: priority queues inside namespaces. One row per item, because items are leased, delayed and retried one by one.

CREATE TABLE queen.topic_namespaces (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    quota_per_minute integer,
    created_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN queen.topic_namespaces.quota_per_minute IS 'Items that may be enqueued per minute; null: as NAMESPACE_QUOTAS says.';

CREATE TABLE queen.topics (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace_id integer NOT NULL REFERENCES queen.topic_namespaces,
    name text NOT NULL,
    max_retries integer NOT NULL DEFAULT 3,
    backoff_base_ms integer NOT NULL DEFAULT 1000,
    backoff_cap_ms integer NOT NULL DEFAULT 300000,
    lease_seconds integer NOT NULL DEFAULT 30,
    at_most_once boolean NOT NULL DEFAULT false,
    ttl_seconds integer,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (namespace_id, name)
);
COMMENT ON COLUMN queen.topics.ttl_seconds IS 'How long an item may wait once it is due; null: for ever.';

-- No foreign key to topics: checking it would cost more than the insert. Items of a deleted topic are swept away.
CREATE TABLE queen.topic_items (
    id bigint PRIMARY KEY,
    deliver_after timestamptz NOT NULL,
    leased_until timestamptz,
    expires_at timestamptz,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    first_failed_at timestamptz,
    topic_id integer NOT NULL,
    priority integer NOT NULL,
    retries integer NOT NULL DEFAULT 0,
    is_json boolean NOT NULL,
    lease_owner text,
    idempotency_key text,
    last_error text,
    metadata bytea,
    payload bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000,
        autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
        vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE queen.topic_items ALTER COLUMN payload SET STORAGE EXTERNAL;
-- Exactly the order of service, over what can be served: an item that is leased leaves it.
CREATE INDEX topic_items_ready ON queen.topic_items (topic_id, priority, deliver_after, id) WHERE leased_until IS NULL;
CREATE INDEX topic_items_leased ON queen.topic_items (leased_until) WHERE leased_until IS NOT NULL;
CREATE INDEX topic_items_expiring ON queen.topic_items (expires_at) WHERE expires_at IS NOT NULL;
COMMENT ON COLUMN queen.topic_items.lease_owner IS 'Who holds the lease, or held it until it lapsed; null once it was given back.';
COMMENT ON COLUMN queen.topic_items.is_json IS 'Whether the payload is a JSON text that was enqueued as `data`.';

-- Where the ready items of a priority begin. While some transaction runs for long, PostgreSQL cannot remove the index
-- entries of items that were consumed meanwhile: a dequeue that began at the front would step over all of them.
CREATE TABLE queen.topic_heads (
    topic_id integer NOT NULL,
    priority integer NOT NULL,
    head timestamptz NOT NULL,
    PRIMARY KEY (topic_id, priority)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);
COMMENT ON COLUMN queen.topic_heads.head IS 'No ready item of this priority has a smaller deliver_after.';

-- Apart from the items, so that a key outlives its item for a while and is not touched when the item is leased.
CREATE TABLE queen.topic_keys (
    namespace_id integer NOT NULL,
    key text NOT NULL,
    item_id bigint NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (namespace_id, key)
);
CREATE INDEX topic_keys_by_time ON queen.topic_keys (created_at);

CREATE TABLE queen.topic_dead_letters (
    id bigint PRIMARY KEY,
    topic_id integer NOT NULL,
    priority integer NOT NULL,
    retries integer NOT NULL,
    is_json boolean NOT NULL,
    deliver_after timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    first_failed_at timestamptz,
    moved_at timestamptz NOT NULL,
    idempotency_key text,
    last_error text,
    metadata bytea,
    payload bytea NOT NULL
);
CREATE INDEX topic_dead_letters_by_topic ON queen.topic_dead_letters (topic_id, moved_at, id);
COMMENT ON COLUMN queen.topic_dead_letters.id IS 'The id of the item, which it keeps when it is sent round again.';

-- Items that a namespace enqueued (or reserved) in each second of the last minute.
CREATE TABLE queen.topic_usage (
    namespace_id integer NOT NULL,
    second bigint NOT NULL,
    used bigint NOT NULL,
    PRIMARY KEY (namespace_id, second)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);

-- Ids are made by workers, each in stretches of time that it reserved for one of 1024 node numbers: they never clash.
CREATE TABLE queen.topic_nodes (
    node smallint PRIMARY KEY,
    upto_ms bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
INSERT INTO queen.topic_nodes (node) SELECT generate_series(0, 1023);
COMMENT ON COLUMN queen.topic_nodes.upto_ms IS 'Somebody may have made ids of this node up to this millisecond since 1970.';

-- Topics that were deleted; what is left of them is removed in small steps.
CREATE TABLE queen.dropped_topics (
    topic_id integer PRIMARY KEY,
    dropped_at timestamptz NOT NULL DEFAULT now()
);
