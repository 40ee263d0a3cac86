-- Keys and values, in namespaces. A namespace belongs to the queue of its name: it lives in its shard and goes with it.

CREATE TABLE queen.kv (
    namespace text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value text NOT NULL,
    version bigint NOT NULL,
    expires_at timestamptz,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (namespace, key)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX kv_by_expiry ON queen.kv (expires_at) WHERE expires_at IS NOT NULL;
COMMENT ON COLUMN queen.kv.value IS 'JSON, as it was sent.';
COMMENT ON COLUMN queen.kv.version IS 'Rises with every write of a key, also when it was deleted in between.';
COMMENT ON COLUMN queen.kv.expires_at IS 'From then on the key does not exist, whether or not its row was removed; null: never.';

CREATE SEQUENCE queen.kv_versions;

-- Values are never searched: nobody needs to know what is common among them.
ALTER TABLE queen.kv ALTER COLUMN value SET STATISTICS 0;
