-- Takes the rows out that a test left, so that the next one can have its database. Most tests leave a dozen rows in as many
-- tables, so this opens as few tables as it can: to open one costs a new session more than to empty it.
CREATE SCHEMA cleaning;
CREATE TABLE cleaning.seeds (tab regclass PRIMARY KEY, content jsonb NOT NULL);
CREATE TABLE cleaning.counters (seq regclass PRIMARY KEY, last bigint, start bigint NOT NULL);
CREATE TABLE cleaning.commands (tag text NOT NULL);
COMMENT ON TABLE cleaning.commands IS 'What changed more than rows.';

CREATE FUNCTION cleaning.note_command() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  -- Nothing is known of what was dropped.
  IF NOT EXISTS (SELECT FROM pg_event_trigger_ddl_commands())
     OR EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE schema_name IS DISTINCT FROM 'pg_temp') THEN
    INSERT INTO cleaning.commands VALUES (tg_tag);
  END IF;
END $$;

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
  large text[] := '{}';
BEGIN
  PERFORM pg_terminate_backend(pid, 60000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid();
  IF EXISTS (SELECT FROM cleaning.commands) OR EXISTS (
    SELECT FROM pg_db_role_setting d JOIN pg_database b ON b.oid = d.setdatabase WHERE b.datname = current_database()
  ) THEN
    RETURN false;
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
