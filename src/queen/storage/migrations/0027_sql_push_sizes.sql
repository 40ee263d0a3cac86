-- The limit of 64 MB is on the text that is stored: the size of jsonb may be that of a compressed column, and a number with
-- an exponent may have a hundred thousand digits as text. The text is measured when it has been written, because to make it
-- twice would cost each push more than to look at its length; an error takes the row back.

CREATE FUNCTION queen.check_size(bytes bigint) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF bytes > 67108864 THEN
        RAISE EXCEPTION 'payloads of % bytes are too large to be pushed at once', bytes
            USING ERRCODE = 'program_limit_exceeded', HINT = 'A call takes 64 MB: push in several calls, or a reference.';
    END IF;
    RETURN true;
END $$;

-- Refuses nulls, and what is known to be too large before its text is made.
CREATE OR REPLACE FUNCTION queen.check_payloads(payloads jsonb[]) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF array_ndims(payloads) > 1 THEN
        RAISE EXCEPTION 'payloads must be an array of one dimension' USING ERRCODE = 'array_subscript_error',
            HINT = 'Build it with ARRAY[...] or array_agg.';
    ELSIF payloads IS NULL OR array_position(payloads, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'payload must not be null' USING ERRCODE = 'null_value_not_allowed',
            HINT = 'A message without content has the JSON value null: ''null''::jsonb.';
    END IF;
    RETURN queen.check_size(pg_column_size(payloads));
END $$;

CREATE OR REPLACE FUNCTION queen.check_array(items jsonb) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF items IS NULL OR jsonb_typeof(items) <> 'array' THEN
        RAISE EXCEPTION 'items must be a JSON array' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Build it with jsonb_build_array or jsonb_agg.';
    END IF;
    PERFORM queen.check_size(octet_length(items::text));
    RETURN items;
END $$;

CREATE OR REPLACE FUNCTION queen.push(
    queue text, partition text, payload jsonb, transaction_id text DEFAULT NULL, trace_id uuid DEFAULT NULL
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    named text;
    given text[];
    own_id text;
    awake bigint;
    bytes bigint;
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
        pg_sequence_last_value('queen.inbox_awake'), octet_length(i.body) INTO own_id, awake, bytes;
    IF awake IS NULL THEN
        PERFORM queen.check_payloads(ARRAY[payload]), queen.check_push(queue, coalesce(push.partition, 'Default'), 1);
        INSERT INTO queen.inbox AS i (trace_id, queue, partition, transaction_ids, body)
        VALUES (push.trace_id, push.queue, coalesce(push.partition, 'Default'), given, '[' || payload::text || ']')
        RETURNING CASE WHEN named IS NULL THEN queen.inbox_transaction_id(i.id, i.pushed_at) ELSE named END,
            pg_sequence_last_value('queen.inbox_awake'), octet_length(i.body) INTO own_id, awake, bytes;
    END IF;
    IF bytes > 67108864 THEN
        PERFORM queen.check_size(bytes);
    END IF;
    -- Read after the insert: a server that goes to sleep looks for transactions that have written to the inbox.
    IF awake = 1 THEN
        PERFORM pg_notify('queen_inbox', '');
    END IF;
    RETURN own_id;
END $$;

CREATE OR REPLACE FUNCTION queen.push_many(
    queue text, partition text, payloads jsonb[], transaction_ids text[] DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    partition_ text := coalesce(partition, 'Default');
    done boolean := queen.check_payloads(payloads);
    messages bigint := cardinality(payloads);
    bytes bigint;
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
        VALUES (messages, queue, partition_, transaction_ids, array_to_json(payloads)::text)
        RETURNING octet_length(body) INTO bytes;
    ELSE
        WITH pushed AS (
            INSERT INTO queen.inbox (count, queue, partition, transaction_ids, body)
            SELECT count(*), queue, partition_,
                CASE WHEN transaction_ids IS NOT NULL THEN array_agg(i.id ORDER BY i.place) END,
                '[' || string_agg(i.payload::text, ',' ORDER BY i.place) || ']'
            FROM unnest(payloads, transaction_ids) WITH ORDINALITY AS i (payload, id, place)
            GROUP BY (i.place - 1) / 1000 ORDER BY (i.place - 1) / 1000
            RETURNING octet_length(body) AS size
        )
        SELECT sum(size) INTO bytes FROM pushed;
    END IF;
    done := queen.check_size(bytes) AND queen.wake_inbox();
    RETURN messages;
END $$;

CREATE OR REPLACE FUNCTION queen.enqueue(
    namespace text, topic text, payload jsonb, priority integer DEFAULT 0, deliver_after timestamptz DEFAULT NULL,
    key text DEFAULT NULL, ttl interval DEFAULT NULL, metadata jsonb DEFAULT NULL
) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    done boolean := queen.check_enqueue(namespace, topic, 1) AND queen.check_size(pg_column_size(payload));
    bytes bigint;
BEGIN
    INSERT INTO queen.inbox (topic, queue, partition, body) VALUES (true, namespace, topic,
        '[' || queen.topic_item(namespace, topic, payload, priority, deliver_after, key, ttl, metadata) || ']')
    RETURNING octet_length(body) INTO bytes;
    done := queen.check_size(bytes) AND queen.wake_inbox();
END $$;

CREATE OR REPLACE FUNCTION queen.enqueue_many(
    namespace text, topic text, payloads jsonb[], priority integer DEFAULT 0, deliver_after timestamptz DEFAULT NULL,
    keys text[] DEFAULT NULL, ttl interval DEFAULT NULL, metadata jsonb DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    done boolean := queen.check_payloads(payloads);
    items bigint := cardinality(payloads);
    bytes bigint;
BEGIN
    IF cardinality(keys) <> items OR array_ndims(keys) > 1 THEN
        RAISE EXCEPTION '% payloads were given, and % keys', items, cardinality(keys)
            USING ERRCODE = 'array_subscript_error', HINT = 'Give one for each payload (null: none), or none.';
    END IF;
    done := queen.check_enqueue(namespace, topic, items);
    WITH enqueued AS (
        INSERT INTO queen.inbox (count, topic, queue, partition, body)
        SELECT count(*), true, namespace, topic, '[' || string_agg(queen.topic_item(
            namespace, topic, i.payload, priority, deliver_after, i.key, ttl, metadata), ',' ORDER BY i.place) || ']'
        FROM unnest(payloads, keys) WITH ORDINALITY AS i (payload, key, place)
        GROUP BY (i.place - 1) / 1000 ORDER BY (i.place - 1) / 1000
        RETURNING octet_length(body) AS size
    )
    SELECT sum(size) INTO bytes FROM enqueued;
    done := queen.check_size(bytes) AND queen.wake_inbox();
    RETURN items;
END $$;
