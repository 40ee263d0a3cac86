-- Pipelines that write to a table: which batches it holds. The table is in the user's database, outside of Queen's schema.

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
