-- Ephemeral queues. What they are declared with is kept; their messages are not logged, and are gone after a crash of
-- PostgreSQL or a failover.
CREATE TABLE queen.ephemeral_queues (
    name text COLLATE "C" PRIMARY KEY,
    options jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE UNLOGGED TABLE queen.ephemeral_rings (
    queue text COLLATE "C" PRIMARY KEY,
    epoch bigint NOT NULL,
    next_seq bigint NOT NULL DEFAULT 1,
    length bigint NOT NULL DEFAULT 0,
    bytes bigint NOT NULL DEFAULT 0,
    used_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON COLUMN queen.ephemeral_rings.epoch IS 'Part of the ids of its messages: those of another life of the queue are stale.';

CREATE UNLOGGED TABLE queen.ephemeral_messages (
    queue text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    partition text COLLATE "C" NOT NULL,
    payload text NOT NULL,
    pushed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue, seq)
);

CREATE UNLOGGED TABLE queen.ephemeral_groups (
    queue text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue, name)
);

CREATE UNLOGGED TABLE queen.ephemeral_cursors (
    queue text COLLATE "C" NOT NULL,
    group_name text COLLATE "C" NOT NULL,
    partition text COLLATE "C" NOT NULL,
    next_seq bigint NOT NULL,
    PRIMARY KEY (queue, group_name, partition)
) WITH (fillfactor = 70);

CREATE UNLOGGED TABLE queen.ephemeral_leases (
    queue text COLLATE "C" NOT NULL,
    group_name text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    until timestamptz NOT NULL,
    attempts integer NOT NULL,
    PRIMARY KEY (queue, group_name, seq)
);
