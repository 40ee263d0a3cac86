-- Shards: which one this database is, what lives elsewhere, and what is being moved. None of it is used by a server that
-- has one database.

CREATE TABLE IF NOT EXISTS queen.shard (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    number integer NOT NULL,
    layout integer[] NOT NULL,
    next_layout integer[],
    version bigint NOT NULL DEFAULT 1
);
COMMENT ON TABLE queen.shard IS 'One row, which says which shard this database is; none where there is only one.';
COMMENT ON COLUMN queen.shard.layout IS 'The shards that take new names: the hash of a name picks one of them.';
COMMENT ON COLUMN queen.shard.next_layout IS 'While it is being changed: until then, both have to agree about a new name.';
COMMENT ON COLUMN queen.shard.version IS 'Goes up with every change of the layout and of where things live.';

-- Names that live elsewhere than their hash says, or that were here once. A name of two parts has a line break between.
CREATE TABLE IF NOT EXISTS queen.placements (
    kind text NOT NULL,
    name text NOT NULL,
    shard integer NOT NULL,
    move_id uuid,
    arriving boolean NOT NULL DEFAULT false,
    left_id integer,
    PRIMARY KEY (kind, name)
);
CREATE INDEX IF NOT EXISTS placements_left ON queen.placements (left_id) WHERE left_id IS NOT NULL;
COMMENT ON COLUMN queen.placements.left_id IS 'The id of a topic that has left.';
CREATE INDEX IF NOT EXISTS placements_arriving ON queen.placements (move_id) WHERE arriving;
COMMENT ON COLUMN queen.placements.shard IS 'Where it lives; while it is arriving, where it comes from.';
COMMENT ON COLUMN queen.placements.move_id IS 'The move that took it away from here, or that it is arriving by.';

-- Moves that are under way: on the shard that something leaves, and on the one it goes to.
CREATE TABLE IF NOT EXISTS queen.moves (
    id uuid PRIMARY KEY,
    kind text NOT NULL,
    name text NOT NULL,
    from_shard integer NOT NULL,
    to_shard integer NOT NULL,
    partitions bigint[],
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN queen.moves.partitions IS 'Where a queue leaves: those whose segments are still to be removed.';

-- What a move brings, as it is to be stored. Segments are too many to wait here: they are stored in their place at once,
-- where nobody looks for them before their partitions are there.
CREATE TABLE IF NOT EXISTS queen.move_rows (
    move_id uuid NOT NULL,
    place bigint GENERATED ALWAYS AS IDENTITY,
    table_name text NOT NULL,
    rows jsonb NOT NULL,
    PRIMARY KEY (move_id, place)
);

-- Segments that were rewritten while their queue was being copied.
CREATE TABLE IF NOT EXISTS queen.rewritten_segments (
    partition_id bigint NOT NULL,
    base_offset bigint NOT NULL,
    PRIMARY KEY (partition_id, base_offset)
);

-- Which shard an idempotency key of a namespace belongs to; kept by the shard that the namespace belongs to.
CREATE TABLE IF NOT EXISTS queen.topic_key_claims (
    namespace text NOT NULL,
    key text NOT NULL,
    shard integer NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (namespace, key)
);
CREATE INDEX IF NOT EXISTS topic_key_claims_by_time ON queen.topic_key_claims (claimed_at);

CREATE OR REPLACE FUNCTION queen.fnv1a32(text) RETURNS bigint LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    bytes bytea := convert_to($1, 'UTF8');
    hash bigint := 2166136261;
BEGIN
    FOR i IN 0 .. length(bytes) - 1 LOOP
        hash := ((hash # get_byte(bytes, i)) * 16777619) & 4294967295;
    END LOOP;
    RETURN hash;
END $$;

-- A new name may be made here if it is known to live here, or if its hash says so. Called after the row was stored, so
-- that who waited for a move to end sees where it went.
CREATE OR REPLACE FUNCTION queen.check_place(kind_ text, name_ text, hashed text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    me queen.shard;
    lives integer;
    chosen integer;
BEGIN
    SELECT * INTO me FROM queen.shard FOR SHARE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT shard INTO lives FROM queen.placements WHERE kind = kind_ AND name = name_;
    IF NOT FOUND THEN
        chosen := me.layout[1 + queen.fnv1a32(hashed) % cardinality(me.layout)];
        lives := chosen;
        IF me.next_layout IS NOT NULL AND
            me.next_layout[1 + queen.fnv1a32(hashed) % cardinality(me.next_layout)] <> chosen THEN
            RAISE EXCEPTION 'shards are being added or removed, and % % cannot be made until that is done',
                kind_, replace(name_, E'\n', '/') USING ERRCODE = 'QN002';
        END IF;
    END IF;
    IF lives <> me.number THEN
        RAISE EXCEPTION '% % lives on shard %, not on shard %', kind_, replace(name_, E'\n', '/'), lives, me.number
            USING ERRCODE = 'QN001';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION queen.check_queue_place() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM queen.check_place('queue', NEW.name, ':' || NEW.name);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER check_place AFTER INSERT ON queen.queues
FOR EACH ROW EXECUTE FUNCTION queen.check_queue_place();

CREATE OR REPLACE FUNCTION queen.check_topic_place() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    namespace text := (SELECT name FROM queen.topic_namespaces WHERE id = NEW.namespace_id);
BEGIN
    PERFORM queen.check_place('topic', namespace || E'\n' || NEW.name, namespace || ':' || NEW.name);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER check_place AFTER INSERT ON queen.topics
FOR EACH ROW EXECUTE FUNCTION queen.check_topic_place();

-- Triggers of shards alone: they are made when a database becomes one of several, so that others need not pay for them.
-- An enqueue that waited for a move to end began when the topic was still here.
CREATE OR REPLACE FUNCTION queen.refuse_items_of_left_topics() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    name_ text;
BEGIN
    SELECT p.name INTO name_ FROM queen.placements p
    WHERE p.left_id IN (SELECT DISTINCT topic_id FROM added) AND p.shard <> (SELECT number FROM queen.shard) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'topic % has left this shard', replace(name_, E'\n', '/') USING ERRCODE = 'QN001';
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION queen.refuse_traces_of_left_queues() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM queen.moves WHERE NEW.partition_id = ANY (partitions))
        AND NOT EXISTS (SELECT FROM queen.partitions WHERE id = NEW.partition_id) THEN
        RAISE EXCEPTION 'the queue of partition % has left this shard', NEW.partition_id USING ERRCODE = 'QN001';
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION queen.note_rewritten_segment() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.rewritten_segments SELECT NEW.partition_id, NEW.base_offset
    WHERE EXISTS (SELECT FROM queen.moves WHERE kind = 'queue') ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER note_rewritten AFTER UPDATE ON queen.segments
FOR EACH ROW EXECUTE FUNCTION queen.note_rewritten_segment();

-- Store what a move has brought. The caller knows that it has left the other shard for good; who comes second does
-- nothing.
CREATE OR REPLACE FUNCTION queen.complete_move(moved uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    chunk record;
BEGIN
    UPDATE queen.placements SET shard = s.number, move_id = NULL, arriving = false
    FROM queen.shard s WHERE move_id = moved AND arriving;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE queen.shard SET version = version + 1;
    FOR chunk IN SELECT table_name, rows FROM queen.move_rows WHERE move_id = moved ORDER BY place LOOP
        EXECUTE format('INSERT INTO queen.%1$I OVERRIDING SYSTEM VALUE
            SELECT * FROM jsonb_populate_recordset(NULL::queen.%1$I, $1) %2$s', chunk.table_name,
            -- These outlive what they belong to, so they may have been here before.
            CASE WHEN chunk.table_name IN ('subscriptions', 'topic_keys') THEN 'ON CONFLICT DO NOTHING' END)
            USING chunk.rows;
    END LOOP;
    DELETE FROM queen.move_rows WHERE move_id = moved;
    DELETE FROM queen.moves WHERE id = moved;
    RETURN true;
END $$;
