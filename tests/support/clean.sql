-- Takes the rows out that a test left, so that the next one can have its database. Most tests leave a dozen rows in as many
-- tables, so this opens as few tables as it can: to open one costs a new session more than to empty it.
CREATE SCHEMA cleaning;
CREATE TABLE cleaning.seeds (tab regclass PRIMARY KEY, content jsonb NOT NULL);
CREATE TABLE cleaning.counters (seq regclass PRIMARY KEY, last bigint, start bigint NOT NULL);
CREATE TABLE cleaning.commands (tag text NOT NULL);
COMMENT ON TABLE cleaning.commands IS 'What changed more than rows, or may have: tables of users and triggers.';

CREATE TABLE cleaning.definitions (definition text NOT NULL);
COMMENT ON TABLE cleaning.definitions IS 'Triggers, and tables of users, as they were.';

CREATE FUNCTION cleaning.note_command() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  IF tg_tag = 'COMMENT' THEN
    RETURN;
  END IF;
  -- Nothing is known of what was dropped. What was to be created if it did not exist, and did, is not named either.
  INSERT INTO cleaning.commands SELECT tg_tag
   WHERE tg_tag NOT LIKE 'CREATE %' AND NOT EXISTS (SELECT FROM pg_event_trigger_ddl_commands());
  INSERT INTO cleaning.commands
    SELECT CASE WHEN object_type = 'trigger' OR object_identity LIKE 'queen_proxy%' THEN 'compare' ELSE tg_tag END
      FROM pg_event_trigger_ddl_commands() WHERE schema_name IS DISTINCT FROM 'pg_temp';
END $$;

CREATE FUNCTION cleaning.definitions() RETURNS SETOF text LANGUAGE sql AS $$
  SELECT pg_get_triggerdef(oid) || ' ' || tgenabled::text FROM pg_trigger WHERE NOT tgisinternal
  UNION ALL
  SELECT c.relname || '.' || a.attname || ' ' || a.atttypid::regtype || ' ' || a.attnotnull
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
   WHERE c.relnamespace = to_regnamespace('queen_proxy') AND a.attnum > 0
$$;

-- The tables that tests fill, and whether anything was written to them since the last cleaning: the sessions that wrote
-- have ended, and counted that.
CREATE FUNCTION cleaning.tables(OUT tab regclass, OUT written boolean) RETURNS SETOF record LANGUAGE sql AS $$
  SELECT oid, pg_stat_get_tuples_inserted(oid) + pg_stat_get_tuples_updated(oid) + pg_stat_get_tuples_deleted(oid) > 0
    FROM pg_class WHERE relkind = 'r' AND relnamespace IN (
      to_regnamespace('queen')::oid, to_regnamespace('queen_proxy')::oid, to_regnamespace('public')::oid)
$$;

CREATE FUNCTION cleaning.remember() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  tab regclass;
BEGIN
  FOR tab IN SELECT t.tab FROM cleaning.tables() t LOOP
    EXECUTE format('INSERT INTO cleaning.seeds SELECT %L, jsonb_agg(to_jsonb(t)) FROM %s t HAVING count(*) > 0', tab, tab);
  END LOOP;
  INSERT INTO cleaning.definitions SELECT * FROM cleaning.definitions();
  INSERT INTO cleaning.counters SELECT seqrelid, pg_sequence_last_value(seqrelid), seqstart FROM pg_sequence;
  CREATE EVENT TRIGGER note_command ON ddl_command_end EXECUTE FUNCTION cleaning.note_command();
  DELETE FROM cleaning.commands;
  PERFORM pg_stat_reset();
END $$;

-- False, and nothing done, when more than rows was changed.
CREATE FUNCTION cleaning.clean() RETURNS boolean LANGUAGE plpgsql SET session_replication_role = 'replica' AS $$
DECLARE
  tab regclass;
  seed jsonb;
  added name;
  large text[] := '{}';
BEGIN
  PERFORM pg_terminate_backend(pid, 60000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid();
  IF EXISTS (SELECT FROM cleaning.commands WHERE tag <> 'compare') OR EXISTS (
    SELECT FROM pg_db_role_setting d JOIN pg_database b ON b.oid = d.setdatabase WHERE b.datname = current_database()
  ) THEN
    RETURN false;
  END IF;
  IF EXISTS (SELECT FROM cleaning.commands) THEN
    -- A database that became a shard has triggers which others have not.
    FOR tab, added IN
      SELECT tgrelid, tgname FROM pg_trigger WHERE NOT tgisinternal AND pg_get_triggerdef(oid) || ' ' || tgenabled::text NOT IN (
        SELECT definition FROM cleaning.definitions)
    LOOP
      EXECUTE format('DROP TRIGGER %I ON %s', added, tab);
    END LOOP;
    IF EXISTS (TABLE cleaning.definitions EXCEPT ALL SELECT * FROM cleaning.definitions())
       OR EXISTS (SELECT * FROM cleaning.definitions() EXCEPT ALL TABLE cleaning.definitions) THEN
      RETURN false;
    END IF;
    DELETE FROM cleaning.commands;
    -- A shard's counters begin at its own range, which does not show in those that have not counted yet.
    PERFORM setval(seq, coalesce(last, start), last IS NOT NULL) FROM cleaning.counters;
  END IF;
  FOR tab IN SELECT t.tab FROM cleaning.tables() t WHERE t.written AND t.tab NOT IN (SELECT s.tab FROM cleaning.seeds s)
  LOOP
    -- Rows that are only deleted would be in the way of many tests to come.
    IF pg_table_size(tab) > 262144 THEN
      large := large || tab::text;
    ELSE
      EXECUTE format('DELETE FROM %s', tab);
    END IF;
  END LOOP;
  IF large <> '{}' THEN
    EXECUTE 'TRUNCATE ' || array_to_string(large, ', ') || ' CASCADE';
  END IF;
  FOR tab, seed IN
    SELECT s.tab, s.content FROM cleaning.seeds s JOIN cleaning.tables() t USING (tab)
     WHERE t.written OR pg_relation_size(s.tab) = 0
  LOOP
    EXECUTE format('DELETE FROM %s', tab);
    EXECUTE format('INSERT INTO %s OVERRIDING SYSTEM VALUE SELECT * FROM jsonb_populate_recordset(NULL::%s, $1)', tab, tab)
      USING seed;
  END LOOP;
  PERFORM setval(seq, coalesce(last, start), last IS NOT NULL)
    FROM cleaning.counters WHERE pg_sequence_last_value(seq) IS DISTINCT FROM last;
  PERFORM pg_stat_reset();
  RETURN true;
END $$;
