-- How a namespace of topics is written to: in PostgreSQL before the answer, or in a log on disk and from there.

ALTER TABLE queen.topic_namespaces ADD COLUMN IF NOT EXISTS write_mode text CHECK (write_mode IN ('sync', 'buffered'));
COMMENT ON COLUMN queen.topic_namespaces.write_mode IS 'Null: as NAMESPACE_MODES says.';

ALTER TABLE queen.spool_progress ADD COLUMN IF NOT EXISTS gone_at timestamptz;
COMMENT ON COLUMN queen.spool_progress.gone_at IS 'Since when there is no such file; copies of what it held may still be found.';
