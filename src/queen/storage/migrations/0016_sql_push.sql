-- Pushing from SQL: a transaction of any session puts messages into the inbox, from where a server appends them.

-- The one who appends takes rows as their transactions become visible, so a transaction that lasts keeps nobody waiting.
-- `xid` comes first: a transaction has its number before it draws an id.
CREATE TABLE queen.inbox (
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pushed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    trace_id uuid,
    count integer NOT NULL DEFAULT 1,
    topic boolean NOT NULL DEFAULT false,
    queue text NOT NULL,
    partition text NOT NULL,
    transaction_ids text[],
    body text NOT NULL
) WITH (toast_tuple_target = 8160, vacuum_truncate = off, toast.vacuum_truncate = off,
        autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
        autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000);
ALTER TABLE queen.inbox ALTER COLUMN body SET STORAGE EXTERNAL, ALTER COLUMN body SET STATISTICS 0,
    ALTER COLUMN transaction_ids SET STATISTICS 0;
-- What a transaction pushed that was still running when later ids were taken.
CREATE INDEX inbox_by_transaction ON queen.inbox (xid, id);
COMMENT ON TABLE queen.inbox IS 'Messages and items pushed from SQL that are not appended yet.';
COMMENT ON COLUMN queen.inbox.xid IS 'The transaction that pushed it, and not one of its savepoints.';
COMMENT ON COLUMN queen.inbox.topic IS 'Whether these are items: then queue is their namespace, and partition their topic.';
COMMENT ON COLUMN queen.inbox.transaction_ids IS 'Null, or null in it: queen.inbox_transaction_id, or made by the server.';
COMMENT ON COLUMN queen.inbox.body IS 'A JSON array: of payloads, or of items as POST /api/v1/topics/enqueue takes them.';

-- What cannot become a message, not even a dead letter: somebody wrote to the inbox without the functions, say.
CREATE TABLE queen.inbox_refused (
    id bigint PRIMARY KEY,
    pushed_at timestamptz NOT NULL,
    refused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason text NOT NULL,
    trace_id uuid,
    topic boolean NOT NULL,
    queue text NOT NULL,
    partition text NOT NULL,
    transaction_ids text[],
    body text NOT NULL
);

-- Rows that another shard has sent here, because their queue or topic lives here now: each is stored once.
CREATE TABLE queen.inbox_forwarded (
    shard integer NOT NULL,
    id bigint NOT NULL,
    forwarded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (shard, id)
);

-- Counted in the very transaction that appends.
CREATE TABLE queen.inbox_totals (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    appended bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    dead_letters bigint NOT NULL DEFAULT 0,
    refused bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);
INSERT INTO queen.inbox_totals DEFAULT VALUES;

-- 1: a push has to notify the server, which sleeps. 2: it looks by itself. A sequence, because what is set is seen at
-- once by every transaction, whatever its snapshot. NOTIFY in every transaction would make their commits wait in line.
CREATE SEQUENCE queen.inbox_awake MINVALUE 1 MAXVALUE 2;
SELECT setval('queen.inbox_awake', 1);

-- Raises what POST /api/v1/push answers with 400.
CREATE FUNCTION queen.check_name(what text, name text) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF name IS NULL THEN
        RAISE EXCEPTION '% must not be null', what USING ERRCODE = 'null_value_not_allowed',
            HINT = 'It is a name of 1 to 255 characters.';
    ELSIF name = '' THEN
        RAISE EXCEPTION '% must not be empty', what USING ERRCODE = 'invalid_parameter_value',
            HINT = 'It is a name of 1 to 255 characters.';
    ELSIF length(name) > 255 THEN
        RAISE EXCEPTION '% must be at most 255 characters, not %', what, length(name)
            USING ERRCODE = 'string_data_right_truncation', HINT = 'Shorten the name.';
    ELSIF name ~ '[\u0001-\u001f\u007f-\u00a0\u00ad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ue000-\uf8ff\ufeff\ufff9-\ufffb]' THEN
        RAISE EXCEPTION '% must not contain control characters', what USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Names are made of printable characters and plain spaces.';
    END IF;
    RETURN true;
END $$;

-- A name that is not known here may be made here, or lives on another shard. Locks nothing: the caller's transaction may last.
CREATE FUNCTION queen.check_lives_here(kind_ text, name_ text, hashed text) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    me queen.shard;
    lives integer;
BEGIN
    SELECT * INTO me FROM queen.shard;
    IF NOT FOUND THEN
        RETURN true;
    END IF;
    SELECT shard INTO lives FROM queen.placements WHERE kind = kind_ AND name = name_;
    IF NOT FOUND THEN
        lives := me.layout[1 + queen.fnv1a32(hashed) % cardinality(me.layout)];
    END IF;
    IF lives <> me.number THEN
        RAISE EXCEPTION '% % lives on shard %, and this is the database of shard %', kind_, replace(name_, E'\n', '/'),
            lives, me.number USING ERRCODE = 'QN001', HINT = format(
                'Push in the database of shard %s, or move it here: queen shards move %s %s %s', lives, kind_,
                replace(name_, E'\n', '/'), me.number);
    END IF;
    RETURN true;
END $$;

-- Whether so many messages may go to a queue, which the first of them makes.
CREATE FUNCTION queen.check_push(queue text, partition text, messages bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    known record;
    pending bigint;
    checked boolean := queen.check_name('partition', partition);
BEGIN
    SELECT q.id, q.max_size, q.encryption_enabled INTO known FROM queen.queues q WHERE q.name = queue;
    IF NOT FOUND THEN
        RETURN queen.check_name('queue', queue) AND queen.check_lives_here('queue', queue, ':' || queue);
    END IF;
    IF known.encryption_enabled AND coalesce(current_setting('queen.clear_inbox', true), '') <> 'on' THEN
        RAISE EXCEPTION 'queue "%" is encrypted, and PostgreSQL has no key to encrypt the message with', queue
            USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Push over HTTP, or SET queen.clear_inbox = on to have it lie in clear in queen.inbox and the WAL until it is appended.';
    END IF;
    IF known.max_size > 0 THEN
        SELECT coalesce(sum(p.next_offset - greatest(p.floor_offset, coalesce(c.committed, 0))), 0) INTO pending
        FROM queen.partitions p
        LEFT JOIN LATERAL (SELECT min(committed) AS committed FROM queen.cursors WHERE partition_id = p.id) c ON true
        WHERE p.queue_id = known.id;
        IF pending + messages > known.max_size THEN
            RAISE EXCEPTION 'queue "%" would exceed its capacity of % messages: it holds %, and % more are pushed', queue,
                known.max_size, pending, messages USING ERRCODE = 'configuration_limit_exceeded',
                HINT = 'Consume messages first, or raise maxSize of the queue.';
        END IF;
    END IF;
    RETURN true;
END $$;

-- Whether so many items may go to a topic, which the first of them makes. Quotas that a server has from its settings, or
-- counts in Redis, are checked when the items are stored.
CREATE FUNCTION queen.check_enqueue(namespace text, topic text, items bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    known record;
    quota bigint;
    used bigint;
BEGIN
    SELECT n.id, n.quota_per_minute, t.id AS topic_id INTO known
    FROM queen.topic_namespaces n LEFT JOIN queen.topics t ON t.namespace_id = n.id AND t.name = topic
    WHERE n.name = namespace;
    IF known.topic_id IS NULL AND NOT (queen.check_name('namespace', namespace) AND queen.check_name('topic', topic)
        AND queen.check_lives_here('topic', namespace || E'\n' || topic, namespace || ':' || topic)) THEN
        RETURN false;
    END IF;
    quota := coalesce(known.quota_per_minute,
        (SELECT d.quota_per_minute FROM queen.topic_namespaces d WHERE d.name = 'default'));
    IF quota IS NOT NULL THEN
        SELECT coalesce(sum(u.used), 0) INTO used FROM queen.topic_usage u
        WHERE u.namespace_id = known.id AND u.second > extract(epoch FROM clock_timestamp()) - 60;
        IF used + items > quota THEN
            RAISE EXCEPTION 'namespace "%" may enqueue % items per minute, and has enqueued %', namespace, quota, used
                USING ERRCODE = 'configuration_limit_exceeded', HINT = 'Try again within a minute, or raise its quota.';
        END IF;
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION queen.check_transaction_id(id text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF length(id) > 255 THEN
        RAISE EXCEPTION 'transaction_id must be at most 255 characters, not %', length(id)
            USING ERRCODE = 'string_data_right_truncation', HINT = 'Use a hash of it.';
    END IF;
    RETURN id;
END $$;

-- Refuses more than POST /api/v1/push takes by default, and nulls.
CREATE FUNCTION queen.check_payloads(payloads jsonb[]) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF array_ndims(payloads) > 1 THEN
        RAISE EXCEPTION 'payloads must be an array of one dimension' USING ERRCODE = 'array_subscript_error',
            HINT = 'Build it with ARRAY[...] or array_agg.';
    ELSIF payloads IS NULL OR array_position(payloads, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'payload must not be null' USING ERRCODE = 'null_value_not_allowed',
            HINT = 'A message without content has the JSON value null: ''null''::jsonb.';
    ELSIF pg_column_size(payloads) > 67108864 THEN
        RAISE EXCEPTION 'payloads of % bytes are too large to be pushed at once', pg_column_size(payloads)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'A call takes 64 MB: push in several calls, or a reference.';
    END IF;
    RETURN true;
END $$;

-- To be called after the insert: a server that goes to sleep looks for transactions that have written to the inbox.
CREATE FUNCTION queen.wake_inbox() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF pg_sequence_last_value('queen.inbox_awake') = 1 THEN
        PERFORM pg_notify('queen_inbox', '');
    END IF;
    RETURN true;
END $$;

-- The transaction id of a message that was pushed without one; the server makes the same of the row.
CREATE FUNCTION queen.inbox_transaction_id(id bigint, pushed_at timestamptz) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT 'sql-' || id || '-' || (date_part('epoch', pushed_at) * 1000000)::bigint
$$;

CREATE FUNCTION queen.push(
    queue text, partition text, payload jsonb, transaction_id text DEFAULT NULL, trace_id uuid DEFAULT NULL
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    named text;
    given text[];
    own_id text;
    awake bigint;
BEGIN
    IF transaction_id <> '' THEN
        named := queen.check_transaction_id(transaction_id);
        given := ARRAY[named];
    END IF;
    -- Most pushes are to a queue that exists and takes everything: then one statement does it all.
    INSERT INTO queen.inbox AS i (trace_id, queue, partition, transaction_ids, body)
    SELECT push.trace_id, push.queue, coalesce(push.partition, 'Default'), given, '[' || payload::text || ']'
    FROM queen.queues q
    WHERE q.name = push.queue AND q.max_size = 0 AND NOT q.encryption_enabled AND pg_column_size(payload) <= 67108864
        AND (push.partition IS NULL OR length(push.partition) <= 255 AND push.partition ~ '^[!-~]+$')
    RETURNING CASE WHEN named IS NULL THEN queen.inbox_transaction_id(i.id, i.pushed_at) ELSE named END,
        pg_sequence_last_value('queen.inbox_awake') INTO own_id, awake;
    IF awake IS NULL THEN
        PERFORM queen.check_payloads(ARRAY[payload]), queen.check_push(queue, coalesce(push.partition, 'Default'), 1);
        INSERT INTO queen.inbox AS i (trace_id, queue, partition, transaction_ids, body)
        VALUES (push.trace_id, push.queue, coalesce(push.partition, 'Default'), given, '[' || payload::text || ']')
        RETURNING CASE WHEN named IS NULL THEN queen.inbox_transaction_id(i.id, i.pushed_at) ELSE named END,
            pg_sequence_last_value('queen.inbox_awake') INTO own_id, awake;
    END IF;
    -- Read after the insert: a server that goes to sleep looks for transactions that have written to the inbox.
    IF awake = 1 THEN
        PERFORM pg_notify('queen_inbox', '');
    END IF;
    RETURN own_id;
END $$;
COMMENT ON FUNCTION queen.push IS
    'Push a message when this transaction commits; returns its transaction id. partition null: Default.';

CREATE FUNCTION queen.push_many(queue text, partition text, payloads jsonb[], transaction_ids text[] DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    partition_ text := coalesce(partition, 'Default');
    done boolean := queen.check_payloads(payloads);
    messages bigint := cardinality(payloads);
BEGIN
    IF cardinality(transaction_ids) <> messages OR array_ndims(transaction_ids) > 1 THEN
        RAISE EXCEPTION '% payloads were given, and % transaction ids', messages, cardinality(transaction_ids)
            USING ERRCODE = 'array_subscript_error', HINT = 'Give one for each payload (null: made by the server), or none.';
    END IF;
    done := queen.check_push(queue, partition_, messages);
    IF transaction_ids IS NOT NULL THEN
        PERFORM queen.check_transaction_id(id) FROM unnest(transaction_ids) AS id WHERE length(id) > 255;
    END IF;
    IF messages BETWEEN 1 AND 1000 THEN
        INSERT INTO queen.inbox (count, queue, partition, transaction_ids, body)
        VALUES (messages, queue, partition_, transaction_ids, array_to_json(payloads)::text);
    ELSE
        INSERT INTO queen.inbox (count, queue, partition, transaction_ids, body)
        SELECT count(*), queue, partition_,
            CASE WHEN transaction_ids IS NOT NULL THEN array_agg(i.id ORDER BY i.place) END,
            '[' || string_agg(i.payload::text, ',' ORDER BY i.place) || ']'
        FROM unnest(payloads, transaction_ids) WITH ORDINALITY AS i (payload, id, place)
        GROUP BY (i.place - 1) / 1000 ORDER BY (i.place - 1) / 1000;
    END IF;
    done := queen.wake_inbox();
    RETURN messages;
END $$;
COMMENT ON FUNCTION queen.push_many IS
    'Push messages to one partition, in order, when this transaction commits; returns how many.';

-- Raises for an object with a field that is not among these, or of another type.
CREATE FUNCTION queen.check_item(item jsonb, place bigint, texts text[], others text[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    field record;
BEGIN
    IF jsonb_typeof(item) <> 'object' THEN
        RAISE EXCEPTION 'each item must be an object, not % (at items[%])', jsonb_typeof(item), place - 1
            USING ERRCODE = 'invalid_parameter_value', HINT = 'An item is what the HTTP API takes.';
    END IF;
    FOR field IN SELECT key, value FROM jsonb_each(item) LOOP
        IF field.key = ANY (texts) THEN
            IF jsonb_typeof(field.value) NOT IN ('string', 'null') THEN
                RAISE EXCEPTION '% must be a string, not % (at items[%])', field.key, jsonb_typeof(field.value), place - 1
                    USING ERRCODE = 'invalid_parameter_value', HINT = 'Put it in quotes.';
            END IF;
        ELSIF field.key <> ALL (others) THEN
            RAISE EXCEPTION 'unknown field "%" (at items[%])', field.key, place - 1
                USING ERRCODE = 'invalid_parameter_value',
                HINT = format('An item has %s.', array_to_string(texts || others, ', '));
        END IF;
    END LOOP;
    RETURN true;
END $$;

CREATE FUNCTION queen.check_array(items jsonb) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF items IS NULL OR jsonb_typeof(items) <> 'array' THEN
        RAISE EXCEPTION 'items must be a JSON array' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Build it with jsonb_build_array or jsonb_agg.';
    END IF;
    RETURN items;
END $$;

CREATE FUNCTION queen.push_items(items jsonb) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
    done boolean;
BEGIN
    FOR one IN SELECT value AS item, ordinality FROM jsonb_array_elements(queen.check_array(items)) WITH ORDINALITY LOOP
        done := queen.check_item(one.item, one.ordinality, ARRAY['queue', 'partition', 'transactionId', 'traceId'],
            ARRAY['payload', 'data']);
        RETURN NEXT queen.push(one.item ->> 'queue', one.item ->> 'partition',
            coalesce(one.item -> 'payload', one.item -> 'data', 'null'), one.item ->> 'transactionId',
            nullif(one.item ->> 'traceId', '')::uuid);
    END LOOP;
END $$;
COMMENT ON FUNCTION queen.push_items IS
    'Push messages, each as an item of POST /api/v1/push, when this transaction commits; returns their transaction ids.';

-- An item as POST /api/v1/topics/enqueue takes it.
CREATE FUNCTION queen.topic_item(
    namespace text, topic text, payload jsonb, priority integer, deliver_after timestamptz, key text, ttl interval,
    metadata jsonb
) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    seconds numeric := extract(epoch FROM ttl);
BEGIN
    IF payload IS NULL THEN
        RAISE EXCEPTION 'payload must not be null' USING ERRCODE = 'null_value_not_allowed',
            HINT = 'An item without content has the JSON value null: ''null''::jsonb.';
    ELSIF NOT isfinite(deliver_after) THEN
        RAISE EXCEPTION 'deliver_after must be a moment' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'For instance now() + interval ''5 minutes''; null: at once.';
    ELSIF seconds < 0 OR seconds > 316224000 THEN
        RAISE EXCEPTION 'ttl must be between 0 and ten years' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Null: as the topic says.';
    ELSIF jsonb_typeof(metadata) NOT IN ('object', 'null') OR octet_length(metadata::text) > 65536 THEN
        RAISE EXCEPTION 'metadata must be a JSON object of at most 65536 bytes' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Put what is larger into the payload.';
    ELSIF key <> '' THEN
        PERFORM queen.check_name('key', key);
    END IF;
    RETURN '{"namespace":' || to_json(namespace)::text || ',"topic":' || to_json(topic)::text
        || ',"data":' || payload::text
        || coalesce(',"priority":' || priority, '')
        || coalesce(',"deliver_after":' || to_json(deliver_after AT TIME ZONE 'UTC')::text, '')
        || coalesce(',"idempotency_key":' || to_json(nullif(key, ''))::text, '')
        || coalesce(',"ttl":' || seconds, '')
        || coalesce(',"metadata":' || metadata::text, '') || '}';
END $$;

CREATE FUNCTION queen.enqueue(
    namespace text, topic text, payload jsonb, priority integer DEFAULT 0, deliver_after timestamptz DEFAULT NULL,
    key text DEFAULT NULL, ttl interval DEFAULT NULL, metadata jsonb DEFAULT NULL
) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    done boolean := queen.check_enqueue(namespace, topic, 1);
BEGIN
    IF pg_column_size(payload) > 67108864 THEN
        done := queen.check_payloads(ARRAY[payload]);
    END IF;
    INSERT INTO queen.inbox (topic, queue, partition, body) VALUES (true, namespace, topic,
        '[' || queen.topic_item(namespace, topic, payload, priority, deliver_after, key, ttl, metadata) || ']');
    done := queen.wake_inbox();
END $$;
COMMENT ON FUNCTION queen.enqueue IS 'Enqueue an item of a topic when this transaction commits.';

CREATE FUNCTION queen.enqueue_many(
    namespace text, topic text, payloads jsonb[], priority integer DEFAULT 0, deliver_after timestamptz DEFAULT NULL,
    keys text[] DEFAULT NULL, ttl interval DEFAULT NULL, metadata jsonb DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    done boolean := queen.check_payloads(payloads);
    items bigint := cardinality(payloads);
BEGIN
    IF cardinality(keys) <> items OR array_ndims(keys) > 1 THEN
        RAISE EXCEPTION '% payloads were given, and % keys', items, cardinality(keys)
            USING ERRCODE = 'array_subscript_error', HINT = 'Give one for each payload (null: none), or none.';
    END IF;
    done := queen.check_enqueue(namespace, topic, items);
    INSERT INTO queen.inbox (count, topic, queue, partition, body)
    SELECT count(*), true, namespace, topic, '[' || string_agg(
        queen.topic_item(namespace, topic, i.payload, priority, deliver_after, i.key, ttl, metadata), ',' ORDER BY i.place)
        || ']'
    FROM unnest(payloads, keys) WITH ORDINALITY AS i (payload, key, place)
    GROUP BY (i.place - 1) / 1000 ORDER BY (i.place - 1) / 1000;
    done := queen.wake_inbox();
    RETURN items;
END $$;
COMMENT ON FUNCTION queen.enqueue_many IS
    'Enqueue items of one topic when this transaction commits; returns how many.';

CREATE FUNCTION queen.enqueue_items(items jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
    done boolean;
    enqueued bigint := 0;
BEGIN
    FOR one IN SELECT value AS item, ordinality FROM jsonb_array_elements(queen.check_array(items)) WITH ORDINALITY LOOP
        done := queen.check_item(one.item, one.ordinality, ARRAY['namespace', 'topic', 'idempotency_key', 'deliver_after'],
            ARRAY['data', 'priority', 'delay', 'ttl', 'metadata']);
        IF one.item ->> 'delay' IS NOT NULL AND one.item ->> 'deliver_after' IS NOT NULL THEN
            RAISE EXCEPTION 'deliver_after and delay exclude each other (at items[%])', one.ordinality - 1
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Send one of them.';
        END IF;
        PERFORM queen.enqueue(one.item ->> 'namespace', one.item ->> 'topic', coalesce(one.item -> 'data', 'null'),
            (one.item ->> 'priority')::integer,
            coalesce((one.item ->> 'deliver_after')::timestamptz,
                clock_timestamp() + make_interval(secs => (one.item ->> 'delay')::float8)),
            one.item ->> 'idempotency_key', make_interval(secs => (one.item ->> 'ttl')::float8),
            one.item -> 'metadata');
        enqueued := enqueued + 1;
    END LOOP;
    RETURN enqueued;
END $$;
COMMENT ON FUNCTION queen.enqueue_items IS
    'Enqueue items, each as one of POST /api/v1/topics/enqueue, when this transaction commits; returns how many.';

-- PUBLIC may execute any function by default; the others of the schema run with the rights of their caller.
REVOKE EXECUTE ON FUNCTION queen.push, queen.push_many, queen.push_items, queen.enqueue, queen.enqueue_many,
    queen.enqueue_items FROM PUBLIC;

-- Roles belong to the whole cluster: it may exist, or be made by another database's migration just now, or need another
-- user than this one. docs/sql.md has these lines for whoever makes it later.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'queen_producer') THEN
        CREATE ROLE queen_producer NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN
        NULL;
    WHEN insufficient_privilege THEN
        RAISE NOTICE 'role queen_producer was not created: % may not create roles', current_user;
END $$;
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'queen_producer') THEN
        GRANT USAGE ON SCHEMA queen TO queen_producer;
        GRANT EXECUTE ON FUNCTION queen.push, queen.push_many, queen.push_items, queen.enqueue, queen.enqueue_many,
            queen.enqueue_items TO queen_producer;
    END IF;
END $$;
