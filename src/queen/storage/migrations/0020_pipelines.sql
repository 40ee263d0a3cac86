-- Pipelines as `queen apply` declared them; `queen pipeline run NAME` runs them.

CREATE TABLE IF NOT EXISTS queen.pipelines (
    name text PRIMARY KEY,
    declaration text NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN queen.pipelines.declaration IS 'JSON; as text, because the order of its steps matters.';
