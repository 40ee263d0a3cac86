-- Pipelines: what was declared of them, and which batches a table that they write to holds. Such a table is in the
-- user's database, outside of Queen's schema.

-- name: pipeline_declarations
-- What was declared, by name.
SELECT name, declaration, changed_at FROM queen.pipelines ORDER BY name;

-- name: pipeline_declare
-- Declare a pipeline, or change what was declared; no row when nothing changes.
INSERT INTO queen.pipelines AS p (name, declaration) VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE SET declaration = excluded.declaration, changed_at = now()
WHERE p.declaration <> excluded.declaration
RETURNING p.xmax = 0 AS created;

-- name: pipeline_forget
-- Forget what was declared.
DELETE FROM queen.pipelines WHERE name = $1 RETURNING name;

-- name: pipeline_create_batches
-- The list of the last batch that each writer has stored.
CREATE TABLE IF NOT EXISTS queen_pipeline_batches (
    writer text PRIMARY KEY,
    batch bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- name: pipeline_take_batch
-- This transaction stores a batch of a writer. No row: it was stored before.
INSERT INTO queen_pipeline_batches AS b (writer, batch) VALUES ($1, $2)
ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch, at = now() WHERE b.batch < excluded.batch
RETURNING batch;
