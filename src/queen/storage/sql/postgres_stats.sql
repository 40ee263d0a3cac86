-- How PostgreSQL itself is, from its own statistics. Sizes and counts are of the tables of this schema.

-- name: database_cache
-- How often pages were found in memory.
SELECT datname AS database, blks_read AS disk_reads, blks_hit AS cache_hits,
    coalesce(round(100.0 * blks_hit / nullif(blks_hit + blks_read, 0), 2), 0)::float8 AS ratio
FROM pg_stat_database WHERE datname = current_database();

-- name: table_cache
-- The same by table, the most read first.
SELECT schemaname AS schema, relname AS table, coalesce(heap_blks_read, 0) AS disk_reads,
    coalesce(heap_blks_hit, 0) AS cache_hits,
    coalesce(round(100.0 * heap_blks_hit / nullif(heap_blks_hit + heap_blks_read, 0), 2), 0)::float8 AS ratio
FROM pg_statio_user_tables WHERE schemaname = 'queen' ORDER BY heap_blks_hit + heap_blks_read DESC, relname;

-- name: index_cache
-- The same by index, the most read first.
SELECT schemaname AS schema, relname AS table, indexrelname AS index, coalesce(idx_blks_read, 0) AS disk_reads,
    coalesce(idx_blks_hit, 0) AS cache_hits,
    coalesce(round(100.0 * idx_blks_hit / nullif(idx_blks_hit + idx_blks_read, 0), 2), 0)::float8 AS ratio
FROM pg_statio_user_indexes WHERE schemaname = 'queen' ORDER BY idx_blks_hit + idx_blks_read DESC, indexrelname;

-- name: table_activity
-- Dead rows, updates, and when tables were last vacuumed.
SELECT schemaname AS schema, relname AS table, n_dead_tup AS dead, n_live_tup AS live,
    coalesce(round(100.0 * n_dead_tup / nullif(n_live_tup + n_dead_tup, 0), 2), 0)::float8 AS dead_percentage,
    last_vacuum, last_autovacuum, autovacuum_count, autoanalyze_count, n_tup_upd AS updates, n_tup_hot_upd AS hot_updates,
    coalesce(round(100.0 * n_tup_hot_upd / nullif(n_tup_upd, 0), 2), 0)::float8 AS hot_percentage
FROM pg_stat_user_tables WHERE schemaname = 'queen' ORDER BY n_dead_tup DESC, relname;

-- name: active_queries
-- What is being run just now, the longest first, but for this statement.
SELECT pid, extract(epoch FROM clock_timestamp() - query_start)::float8 AS duration, state, left(query, 500) AS query,
    wait_event_type, wait_event
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle' AND backend_type = 'client backend'
ORDER BY query_start LIMIT 50;

-- name: buffer_config
-- How much memory PostgreSQL has for pages, and whether pg_buffercache is installed.
SELECT setting AS pages, pg_size_pretty(setting::bigint * 8192) AS size,
    EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_buffercache') AS can_tell
FROM pg_settings WHERE name = 'shared_buffers';

-- name: buffer_usage
-- What the memory for pages holds; needs the extension pg_buffercache.
SELECT c.relname AS object, pg_size_pretty(count(*) * 8192) AS size, count(*) * 8192 AS bytes,
    round(100.0 * count(*) / (SELECT setting::numeric FROM pg_settings WHERE name = 'shared_buffers'), 2)::float8
        AS percentage
FROM pg_buffercache b
JOIN pg_class c ON b.relfilenode = pg_relation_filenode(c.oid)
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'queen'
WHERE b.reldatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
GROUP BY c.relname ORDER BY bytes DESC LIMIT 20;

-- name: table_sizes
-- How much room tables take, the largest first.
SELECT c.relname AS table, pg_total_relation_size(c.oid) AS total, pg_table_size(c.oid) AS own,
    pg_indexes_size(c.oid) AS indexes, pg_size_pretty(pg_total_relation_size(c.oid)) AS total_pretty,
    pg_size_pretty(pg_table_size(c.oid)) AS own_pretty, pg_size_pretty(pg_indexes_size(c.oid)) AS indexes_pretty
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'queen' AND c.relkind = 'r' ORDER BY total DESC, c.relname;
