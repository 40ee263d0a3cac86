-- What is no time, number or UUID is an error with a hint to those who push from SQL, and not found out after their commit.

-- An item as POST /api/v1/topics/enqueue takes it.
CREATE OR REPLACE FUNCTION queen.topic_item(
    namespace text, topic text, payload jsonb, priority integer, deliver_after timestamptz, key text, ttl interval,
    metadata jsonb
) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    seconds numeric := extract(epoch FROM ttl);
BEGIN
    IF payload IS NULL THEN
        RAISE EXCEPTION 'payload must not be null' USING ERRCODE = 'null_value_not_allowed',
            HINT = 'An item without content has the JSON value null: ''null''::jsonb.';
    ELSIF deliver_after AT TIME ZONE 'UTC' NOT BETWEEN timestamp '0001-01-01' AND timestamp '9999-12-31 23:59:59.999999' THEN
        RAISE EXCEPTION 'deliver_after must be a moment in the years 1 to 9999' USING ERRCODE = 'invalid_parameter_value',
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

CREATE OR REPLACE FUNCTION queen.push_items(items jsonb) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
    done boolean;
    hint text;
BEGIN
    FOR one IN SELECT value AS item, ordinality FROM jsonb_array_elements(queen.check_array(items)) WITH ORDINALITY LOOP
        done := queen.check_item(one.item, one.ordinality, ARRAY['queue', 'partition', 'transactionId', 'traceId'],
            ARRAY['payload', 'data']);
        RETURN NEXT queen.push(one.item ->> 'queue', one.item ->> 'partition',
            coalesce(one.item -> 'payload', one.item -> 'data', 'null'), one.item ->> 'transactionId',
            nullif(one.item ->> 'traceId', '')::uuid);
    END LOOP;
EXCEPTION
    WHEN data_exception THEN
        GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
        IF hint <> '' THEN
            RAISE;
        END IF;
        RAISE EXCEPTION '% (at items[%])', SQLERRM, one.ordinality - 1 USING ERRCODE = SQLSTATE,
            HINT = 'traceId is a UUID.';
END $$;

CREATE OR REPLACE FUNCTION queen.enqueue_items(items jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
    done boolean;
    enqueued bigint := 0;
    hint text;
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
EXCEPTION
    WHEN data_exception THEN
        GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
        IF hint <> '' THEN
            RAISE;
        END IF;
        RAISE EXCEPTION '% (at items[%])', SQLERRM, one.ordinality - 1 USING ERRCODE = SQLSTATE,
            HINT = 'priority is an integer, delay and ttl are seconds, deliver_after is a time such as 2030-01-31T12:00:00Z.';
END $$;
