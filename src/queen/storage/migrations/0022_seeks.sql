-- Where groups were before a seek, for as long as it can be undone. Rows of queues and groups that are gone expire too.

CREATE TABLE queen.seeks (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id integer NOT NULL,
    queue_id integer NOT NULL,
    partition_name text,
    target text NOT NULL,
    sought_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    partitions bigint NOT NULL DEFAULT 0,
    undone_by bigint
);
CREATE INDEX seeks_by_group ON queen.seeks (queue_id, group_id, id);
CREATE INDEX seeks_by_time ON queen.seeks (sought_at);
COMMENT ON COLUMN queen.seeks.target IS 'Where the group went: end, beginning, offset N, a time, or undo N.';
COMMENT ON COLUMN queen.seeks.partitions IS 'On how many partitions the group has moved so far.';

CREATE TABLE queen.seek_positions (
    seek_id bigint NOT NULL,
    partition_id bigint NOT NULL,
    committed bigint NOT NULL,
    PRIMARY KEY (seek_id, partition_id)
);
