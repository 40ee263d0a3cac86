-- Takes the rows out that a test left, so that the next one can have its database.
CREATE SCHEMA cleaning;
CREATE TABLE cleaning.seeds (tab regclass PRIMARY KEY, content jsonb NOT NULL);
CREATE TABLE cleaning.counters (seq regclass PRIMARY KEY, last bigint, start bigint NOT NULL);
CREATE TABLE cleaning.made (structure text NOT NULL);

-- Everything that is not rows: tables, columns, indexes, constraints, triggers, functions, settings of the database.
CREATE FUNCTION cleaning.structure() RETURNS text LANGUAGE sql AS $$
  SELECT md5(concat_ws('|',
    (SELECT string_agg(oid::regclass || relkind::text || relnatts || coalesce(reloptions::text, ''), ',' ORDER BY oid)
       FROM pg_class WHERE oid >= 16384 AND relkind <> 't' AND relnamespace::regnamespace::text !~ '^pg_(temp|toast)'),
    (SELECT string_agg(attrelid || attname::text || atttypid || attnotnull::text, ',' ORDER BY attrelid, attnum)
       FROM pg_attribute WHERE attrelid >= 16384 AND attnum > 0 AND attrelid IN (SELECT oid FROM pg_class WHERE relkind = 'r')),
    (SELECT string_agg(oid || tgname::text || tgenabled::text, ',' ORDER BY oid) FROM pg_trigger),
    (SELECT string_agg(oid || conname, ',' ORDER BY oid) FROM pg_constraint WHERE oid >= 16384),
    (SELECT string_agg(oid || proname || md5(prosrc), ',' ORDER BY oid) FROM pg_proc WHERE oid >= 16384),
    (SELECT string_agg(nspname || coalesce(nspacl::text, ''), ',' ORDER BY oid) FROM pg_namespace WHERE nspname !~ '^pg_(temp|toast)'),
    (SELECT string_agg(setconfig::text, ',') FROM pg_db_role_setting d
      WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database()))))
$$;

CREATE FUNCTION cleaning.tables() RETURNS SETOF regclass LANGUAGE sql AS $$
  SELECT oid::regclass FROM pg_class
   WHERE oid >= 16384 AND relkind = 'r' AND relnamespace::regnamespace::text IN ('queen', 'queen_proxy', 'public')
$$;

CREATE FUNCTION cleaning.remember() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  tab regclass;
BEGIN
  FOR tab IN SELECT cleaning.tables() LOOP
    EXECUTE format('INSERT INTO cleaning.seeds SELECT %L, jsonb_agg(to_jsonb(t)) FROM %s t HAVING count(*) > 0', tab, tab);
  END LOOP;
  INSERT INTO cleaning.counters SELECT seqrelid, pg_sequence_last_value(seqrelid), seqstart FROM pg_sequence;
  INSERT INTO cleaning.made SELECT cleaning.structure();
END $$;

-- False, and nothing done, when the structure is another than it was.
CREATE FUNCTION cleaning.clean() RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  tab regclass;
  seed jsonb;
  used text[] := '{}';
  changed boolean;
BEGIN
  IF (SELECT structure FROM cleaning.made) IS DISTINCT FROM cleaning.structure() THEN
    RETURN false;
  END IF;
  PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid();
  FOR tab, seed IN SELECT t, s.content FROM cleaning.tables() t LEFT JOIN cleaning.seeds s ON s.tab = t LOOP
    IF seed IS NULL THEN
      EXECUTE format('SELECT EXISTS (SELECT FROM %s)', tab) INTO changed;
    ELSE
      EXECUTE format('SELECT jsonb_agg(to_jsonb(t)) IS DISTINCT FROM $1 FROM %s t', tab) INTO changed USING seed;
    END IF;
    IF changed THEN
      used := used || tab::text;
    END IF;
  END LOOP;
  IF used <> '{}' THEN
    EXECUTE 'TRUNCATE ' || array_to_string(used, ', ') || ' CASCADE';
  END IF;
  FOR tab, seed IN SELECT s.tab, s.content FROM cleaning.seeds s LOOP
    EXECUTE format('SELECT NOT EXISTS (SELECT FROM %s)', tab) INTO changed;
    IF changed THEN
      EXECUTE format('INSERT INTO %s OVERRIDING SYSTEM VALUE SELECT * FROM jsonb_populate_recordset(NULL::%s, $1)', tab, tab)
        USING seed;
    END IF;
  END LOOP;
  PERFORM setval(seq, coalesce(last, start), last IS NOT NULL)
    FROM cleaning.counters WHERE pg_sequence_last_value(seq) IS DISTINCT FROM last;
  PERFORM pg_stat_reset();
  RETURN true;
END $$;
