-- Functions are parsed in the session that calls them: with standard_conforming_strings = off a backslash in a string is an
-- escape, so the pattern of a time has none. Errors about an array of items name the item.

-- Raises for an item whose numbers or times are not what POST /api/v1/topics/enqueue takes.
CREATE OR REPLACE FUNCTION queen.check_item_values(item jsonb, place bigint) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    field text;
BEGIN
    FOREACH field IN ARRAY ARRAY['priority', 'delay', 'ttl'] LOOP
        IF jsonb_typeof(item -> field) NOT IN ('number', 'null') THEN
            RAISE EXCEPTION '% must be a number, not % (at items[%])', field, jsonb_typeof(item -> field), place - 1
                USING ERRCODE = 'invalid_text_representation', HINT = 'Without quotes; delay and ttl are seconds.';
        END IF;
    END LOOP;
    IF (item ->> 'delay')::numeric < 0 THEN
        RAISE EXCEPTION 'delay must not be negative (at items[%])', place - 1
            USING ERRCODE = 'invalid_parameter_value', HINT = 'In seconds; null: at once.';
    ELSIF item ->> 'deliver_after' !~* ('^[0-9]{4}-[0-9]{2}-[0-9]{2}[t ][0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?'
        '(z|[+-][0-9]{2}:?[0-9]{2})?$') THEN
        RAISE EXCEPTION 'deliver_after is no time: "%" (at items[%])', item ->> 'deliver_after', place - 1
            USING ERRCODE = 'invalid_datetime_format',
            HINT = 'A time is such as 2030-01-31T12:00:00Z; without a zone it is UTC.';
    END IF;
    RETURN true;
END $$;

-- The text of an error about an item, which says where the item is.
CREATE FUNCTION queen.error_at(message text, place bigint) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN CASE WHEN place IS NULL OR right(message, 1) = ')' AND strpos(message, ' (at items[') > 0 THEN message
        ELSE message || ' (at items[' || place - 1 || '])' END;
END $$;

CREATE OR REPLACE FUNCTION queen.push_items(items jsonb) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one record;
    place bigint;
    done boolean;
    hint text;
BEGIN
    FOR one IN SELECT value AS item, ordinality FROM jsonb_array_elements(queen.check_array(items)) WITH ORDINALITY LOOP
        place := one.ordinality;
        done := queen.check_item(one.item, place, ARRAY['queue', 'partition', 'transactionId', 'traceId'],
            ARRAY['payload', 'data']);
        IF one.item ? 'payload' AND one.item ? 'data' THEN
            RAISE EXCEPTION 'payload and data exclude each other' USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Send one of them.';
        END IF;
        RETURN NEXT queen.push(one.item ->> 'queue', one.item ->> 'partition',
            coalesce(one.item -> 'payload', one.item -> 'data', 'null'), one.item ->> 'transactionId',
            nullif(one.item ->> 'traceId', '')::uuid);
    END LOOP;
EXCEPTION
    WHEN data_exception THEN
        GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
        RAISE EXCEPTION '%', queen.error_at(SQLERRM, place) USING ERRCODE = SQLSTATE,
            HINT = coalesce(nullif(hint, ''), 'traceId is a UUID.');
END $$;

-- A time without a zone is UTC, as over HTTP, and not of the time zone of the session.
CREATE OR REPLACE FUNCTION queen.enqueue_items(items jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    one record;
    place bigint;
    done boolean;
    enqueued bigint := 0;
    hint text;
BEGIN
    FOR one IN SELECT value AS item, ordinality FROM jsonb_array_elements(queen.check_array(items)) WITH ORDINALITY LOOP
        place := one.ordinality;
        done := queen.check_item(one.item, place, ARRAY['namespace', 'topic', 'idempotency_key', 'deliver_after'],
            ARRAY['data', 'priority', 'delay', 'ttl', 'metadata']);
        IF one.item ->> 'delay' IS NOT NULL AND one.item ->> 'deliver_after' IS NOT NULL THEN
            RAISE EXCEPTION 'deliver_after and delay exclude each other' USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Send one of them.';
        END IF;
        done := queen.check_item_values(one.item, place);
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
        -- A time that is none, such as in month 31, has a hint of PostgreSQL about another setting.
        RAISE EXCEPTION '%', queen.error_at(SQLERRM, place) USING ERRCODE = SQLSTATE,
            HINT = CASE WHEN hint <> '' AND SQLSTATE <> '22008' THEN hint ELSE
                'priority is an integer, delay and ttl are seconds, deliver_after is a time such as 2030-01-31T12:00:00Z.' END;
END $$;
