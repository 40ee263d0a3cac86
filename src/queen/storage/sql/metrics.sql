-- History of what workers counted. Series are from $1 until before $2, with rows that a host has not flushed yet.

-- name: flush_life
-- Who a worker is and all it has counted so far; doing it again makes no difference.
INSERT INTO queen.metric_lives AS l
SELECT life, host, port, worker_id, pid, flush, started_at, clock_timestamp(),
    push_requests, push_messages, pop_requests, pop_messages, pop_empty, auto_acked, ack_requests, ack_success,
    ack_failed, transactions, dead_letters, partitions_created, partitions_deleted, lag_ms, lag_max_ms, db_errors,
    batches, http_responses
FROM jsonb_populate_record(NULL::queen.metric_lives, $1::jsonb)
ON CONFLICT (life) DO UPDATE SET
    pid = excluded.pid,
    port = excluded.port,
    flush = excluded.flush,
    seen_at = excluded.seen_at,
    push_requests = excluded.push_requests,
    push_messages = excluded.push_messages,
    pop_requests = excluded.pop_requests,
    pop_messages = excluded.pop_messages,
    pop_empty = excluded.pop_empty,
    auto_acked = excluded.auto_acked,
    ack_requests = excluded.ack_requests,
    ack_success = excluded.ack_success,
    ack_failed = excluded.ack_failed,
    transactions = excluded.transactions,
    dead_letters = excluded.dead_letters,
    partitions_created = excluded.partitions_created,
    partitions_deleted = excluded.partitions_deleted,
    lag_ms = excluded.lag_ms,
    lag_max_ms = excluded.lag_max_ms,
    db_errors = excluded.db_errors,
    batches = excluded.batches,
    http_responses = excluded.http_responses;

-- name: flush_minutes
-- What a worker counted since its last flush, in all and by queue; doing it again makes no difference.
WITH worker AS (
    INSERT INTO queen.metric_minutes SELECT * FROM jsonb_populate_recordset(NULL::queen.metric_minutes, $1::jsonb)
    ON CONFLICT (life, flush) DO NOTHING
)
INSERT INTO queen.metric_queue_minutes
SELECT * FROM jsonb_populate_recordset(NULL::queen.metric_queue_minutes, $2::jsonb)
ON CONFLICT (life, flush, queue_name) DO NOTHING;

-- name: partition_counts
-- How many partitions queues have.
SELECT q.name, (SELECT count(*) FROM queen.partitions p WHERE p.queue_id = q.id) AS partitions
FROM queen.queues q WHERE q.name = ANY($1::text[]);

-- name: remove_old_minutes
-- Some of the history of workers that is older than so many days.
DELETE FROM queen.metric_minutes WHERE (life, flush) IN (
    SELECT life, flush FROM queen.metric_minutes WHERE at < clock_timestamp() - make_interval(days => $1)
    ORDER BY at LIMIT $2
) RETURNING 1;

-- name: remove_old_queue_minutes
-- Some of the history of queues that is older than so many days.
DELETE FROM queen.metric_queue_minutes WHERE (life, flush, queue_name) IN (
    SELECT life, flush, queue_name FROM queen.metric_queue_minutes
    WHERE at < clock_timestamp() - make_interval(days => $1) ORDER BY at LIMIT $2
) RETURNING 1;

-- name: fold_old_lives
-- Sum up what workers counted that are gone for so many days, so that their rows do not pile up.
WITH gone AS (
    DELETE FROM queen.metric_lives WHERE life IN (
        SELECT life FROM queen.metric_lives
        WHERE seen_at < clock_timestamp() - make_interval(days => $1)
            AND life <> '00000000-0000-0000-0000-000000000000' ORDER BY seen_at LIMIT $2 FOR UPDATE
    ) RETURNING *
), folded AS (
    INSERT INTO queen.metric_lives AS l
    SELECT '00000000-0000-0000-0000-000000000000', '', 0, -1, 0, 0, min(started_at), max(seen_at),
    sum(push_requests),
    sum(push_messages),
    sum(pop_requests),
    sum(pop_messages),
    sum(pop_empty),
    sum(auto_acked),
    sum(ack_requests),
    sum(ack_success),
    sum(ack_failed),
    sum(transactions),
    sum(dead_letters),
    sum(partitions_created),
    sum(partitions_deleted),
    sum(lag_ms),
    max(lag_max_ms),
    sum(db_errors),
    sum(batches),
    sum(http_responses)
    FROM gone HAVING count(*) > 0
    ON CONFLICT (life) DO UPDATE SET
    push_requests = l.push_requests + excluded.push_requests,
    push_messages = l.push_messages + excluded.push_messages,
    pop_requests = l.pop_requests + excluded.pop_requests,
    pop_messages = l.pop_messages + excluded.pop_messages,
    pop_empty = l.pop_empty + excluded.pop_empty,
    auto_acked = l.auto_acked + excluded.auto_acked,
    ack_requests = l.ack_requests + excluded.ack_requests,
    ack_success = l.ack_success + excluded.ack_success,
    ack_failed = l.ack_failed + excluded.ack_failed,
    transactions = l.transactions + excluded.transactions,
    dead_letters = l.dead_letters + excluded.dead_letters,
    partitions_created = l.partitions_created + excluded.partitions_created,
    partitions_deleted = l.partitions_deleted + excluded.partitions_deleted,
    lag_ms = l.lag_ms + excluded.lag_ms,
    lag_max_ms = greatest(l.lag_max_ms, excluded.lag_max_ms),
    db_errors = l.db_errors + excluded.db_errors,
    batches = l.batches + excluded.batches,
    http_responses = l.http_responses + excluded.http_responses
)
SELECT 1 FROM gone;

-- name: lifetime_totals
-- All that workers of all hosts ever counted, but for these lives, of which the caller knows better.
SELECT coalesce(sum(push_requests), 0)::bigint AS push_requests, coalesce(sum(push_messages),
    0)::bigint AS push_messages, coalesce(sum(pop_requests), 0)::bigint AS pop_requests, coalesce(sum(pop_messages),
    0)::bigint AS pop_messages, coalesce(sum(pop_empty), 0)::bigint AS pop_empty, coalesce(sum(auto_acked),
    0)::bigint AS auto_acked, coalesce(sum(ack_requests), 0)::bigint AS ack_requests, coalesce(sum(ack_success),
    0)::bigint AS ack_success, coalesce(sum(ack_failed), 0)::bigint AS ack_failed, coalesce(sum(transactions),
    0)::bigint AS transactions, coalesce(sum(dead_letters), 0)::bigint AS dead_letters,
    coalesce(sum(partitions_created), 0)::bigint AS partitions_created, coalesce(sum(partitions_deleted),
    0)::bigint AS partitions_deleted, coalesce(sum(db_errors), 0)::bigint AS db_errors, coalesce(sum(batches),
    0)::bigint AS batches, coalesce(sum(http_responses), 0)::bigint AS http_responses
FROM queen.metric_lives WHERE life <> ALL($1::uuid[]);

-- name: oldest_flush
-- How many seconds ago the worker that waits longest for its flush had its last, of those seen within so many seconds
-- and but for these lives.
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - seen_at)), 0)::float8 AS age FROM queen.metric_lives
WHERE life <> ALL($1::uuid[]) AND seen_at > clock_timestamp() - make_interval(secs => $2);

-- name: worker_series
-- What workers (of a host, with an id) counted, in buckets of so many minutes, newest first.
SELECT date_bin(make_interval(mins => $3), m.at, 'epoch') AS bucket,
    count(DISTINCT m.life) AS workers,
    sum(m.push_requests)::bigint AS push_requests,
    sum(m.push_messages)::bigint AS push_messages,
    sum(m.pop_requests)::bigint AS pop_requests,
    sum(m.pop_messages)::bigint AS pop_messages,
    sum(m.pop_empty)::bigint AS pop_empty,
    sum(m.auto_acked)::bigint AS auto_acked,
    sum(m.ack_requests)::bigint AS ack_requests,
    sum(m.ack_success)::bigint AS ack_success,
    sum(m.ack_failed)::bigint AS ack_failed,
    sum(m.transactions)::bigint AS transactions,
    sum(m.dead_letters)::bigint AS dead_letters,
    sum(m.partitions_created)::bigint AS partitions_created,
    sum(m.partitions_deleted)::bigint AS partitions_deleted,
    sum(m.db_errors)::bigint AS db_errors,
    sum(m.batches)::bigint AS batches,
    sum(m.http_responses)::bigint AS http_responses,
    sum(m.lag_ms) AS lag_ms, max(m.lag_max_ms) AS lag_max_ms,
    avg(m.loop_lag_ms[1]) AS loop_lag_avg, max(m.loop_lag_ms[3]) AS loop_lag_max,
    avg(m.free_slots[1]) AS free_slots_avg, min(m.free_slots[2]) AS free_slots_min,
    avg(m.job_queue[1]) AS job_queue_avg, max(m.job_queue[3]) AS job_queue_max,
    avg(m.db_connections[1]) AS db_connections, avg(m.cpu_user[1]) AS cpu_user, avg(m.cpu_system[1]) AS cpu_system,
    avg(m.rss_bytes[1]) AS rss_bytes, avg(m.pool_active[1]) AS pool_active, avg(m.pool_idle[1]) AS pool_idle,
    avg(m.pool_size[1]) AS pool_size
FROM queen.metric_minutes_between($1, $2, $4::jsonb) m
WHERE ($5::text = '' OR m.host = $5) AND ($6::integer IS NULL OR m.worker_id = $6)
GROUP BY 1 ORDER BY 1 DESC;

-- name: recent_work
-- What all workers counted between $1 and $2, and how long messages had waited when they were popped.
SELECT coalesce(sum(push_messages), 0)::bigint AS pushed,
    coalesce(sum(ack_success + auto_acked + dead_letters), 0)::bigint AS processed,
    coalesce(sum(lag_ms) / nullif(sum(pop_messages), 0), 0)::float8 AS avg_ms,
    coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY lag_ms / pop_messages) FILTER (WHERE pop_messages > 0), 0)
        AS median_ms,
    coalesce(max(lag_max_ms), 0) AS max_ms
FROM queen.metric_minutes_between($1, $2, $3::jsonb) m;

-- name: workers_seen
-- The workers (of a host, with an id) that were there, each with what it counted and how it last was.
SELECT m.host, m.port, m.worker_id, (array_agg(m.pid ORDER BY m.at DESC))[1] AS pid,
    avg(m.loop_lag_ms[1]) AS loop_lag_avg, max(m.loop_lag_ms[3]) AS loop_lag_max,
    (array_agg(m.free_slots[4] ORDER BY m.at DESC))[1] AS free_slots,
    (array_agg(m.db_connections[4] ORDER BY m.at DESC))[1] AS db_connections,
    (array_agg(m.job_queue[4] ORDER BY m.at DESC))[1] AS job_queue,
    sum(m.push_messages + m.pop_messages + m.ack_success + m.ack_failed)::bigint AS messages,
    max(m.at + make_interval(secs => m.seconds)) AS seen_at
FROM queen.metric_minutes_between($1, $2, $3::jsonb) m
WHERE ($4::text = '' OR m.host = $4) AND ($5::integer IS NULL OR m.worker_id = $5)
GROUP BY m.host, m.port, m.worker_id ORDER BY m.host, m.port, m.worker_id;

-- name: system_series
-- How processes (of a host, with an id) were, in buckets of so many minutes, oldest first.
SELECT m.host, m.port, m.worker_id, date_bin(make_interval(mins => $3), m.at, 'epoch') AS bucket, count(*) AS samples,
    ARRAY[avg(m.cpu_user[1]), min(m.cpu_user[2]), max(m.cpu_user[3]),
        (array_agg(m.cpu_user[4] ORDER BY m.at DESC))[1]] AS cpu_user,
    ARRAY[avg(m.cpu_system[1]), min(m.cpu_system[2]), max(m.cpu_system[3]),
        (array_agg(m.cpu_system[4] ORDER BY m.at DESC))[1]] AS cpu_system,
    ARRAY[avg(m.rss_bytes[1]), min(m.rss_bytes[2]), max(m.rss_bytes[3]),
        (array_agg(m.rss_bytes[4] ORDER BY m.at DESC))[1]] AS rss_bytes,
    ARRAY[avg(m.virtual_bytes[1]), min(m.virtual_bytes[2]), max(m.virtual_bytes[3]),
        (array_agg(m.virtual_bytes[4] ORDER BY m.at DESC))[1]] AS virtual_bytes,
    ARRAY[avg(m.pool_size[1]), min(m.pool_size[2]), max(m.pool_size[3]),
        (array_agg(m.pool_size[4] ORDER BY m.at DESC))[1]] AS pool_size,
    ARRAY[avg(m.pool_idle[1]), min(m.pool_idle[2]), max(m.pool_idle[3]),
        (array_agg(m.pool_idle[4] ORDER BY m.at DESC))[1]] AS pool_idle,
    ARRAY[avg(m.pool_active[1]), min(m.pool_active[2]), max(m.pool_active[3]),
        (array_agg(m.pool_active[4] ORDER BY m.at DESC))[1]] AS pool_active,
    ARRAY[avg(m.job_queue[1]), min(m.job_queue[2]), max(m.job_queue[3]),
        (array_agg(m.job_queue[4] ORDER BY m.at DESC))[1]] AS job_queue,
    ARRAY[avg(m.in_flight[1]), min(m.in_flight[2]), max(m.in_flight[3]),
        (array_agg(m.in_flight[4] ORDER BY m.at DESC))[1]] AS in_flight
FROM queen.metric_minutes_between($1, $2, $4::jsonb) m
WHERE ($5::text = '' OR m.host = $5) AND ($6::integer IS NULL OR m.worker_id = $6)
GROUP BY m.host, m.port, m.worker_id, bucket ORDER BY m.host, m.port, m.worker_id, bucket;

-- name: queue_series
-- What was counted for queues ($5: these alone), in buckets of so many minutes, oldest first. With $6, for that many of
-- them, which had the most messages, and (of the name '') for all together.
WITH busiest AS (
    SELECT m.queue_name FROM queen.metric_queue_minutes_between($1, $2, $4::jsonb) m
    WHERE $6::integer > 0 AND ($5::text[] IS NULL OR m.queue_name = ANY($5))
    GROUP BY m.queue_name ORDER BY sum(m.push_messages + m.pop_messages) DESC, m.queue_name LIMIT $6
)
SELECT date_bin(make_interval(mins => $3), m.at, 'epoch') AS bucket, l.queue_name,
    sum(m.push_requests)::bigint AS push_requests,
    sum(m.push_messages)::bigint AS push_messages,
    sum(m.pop_requests)::bigint AS pop_requests,
    sum(m.pop_messages)::bigint AS pop_messages,
    sum(m.pop_empty)::bigint AS pop_empty,
    sum(m.auto_acked)::bigint AS auto_acked,
    sum(m.ack_requests)::bigint AS ack_requests,
    sum(m.ack_success)::bigint AS ack_success,
    sum(m.ack_failed)::bigint AS ack_failed,
    sum(m.transactions)::bigint AS transactions,
    sum(m.dead_letters)::bigint AS dead_letters,
    sum(m.partitions_created)::bigint AS partitions_created,
    sum(m.partitions_deleted)::bigint AS partitions_deleted,
    sum(m.lag_ms) AS lag_ms, max(m.lag_max_ms) AS lag_max_ms, max(m.partition_count) AS partition_count,
    sum(m.parked * m.seconds) AS parked_seconds
FROM queen.metric_queue_minutes_between($1, $2, $4::jsonb) m
CROSS JOIN LATERAL (
    SELECT m.queue_name WHERE $6 IS NULL OR m.queue_name IN (SELECT queue_name FROM busiest)
    UNION ALL
    SELECT '' WHERE $6 IS NOT NULL
) l
WHERE $5::text[] IS NULL OR m.queue_name = ANY($5)
GROUP BY 1, 2 ORDER BY 1, 2;

-- name: queue_lag_series
-- How long messages of queues ($5: these alone) had waited when they were popped, in buckets of so many minutes, newest
-- first.
SELECT date_bin(make_interval(mins => $3), m.at, 'epoch') AS bucket, m.queue_name,
    sum(m.pop_messages)::bigint AS pop_messages, sum(m.lag_ms) AS lag_ms, max(m.lag_max_ms) AS lag_max_ms
FROM queen.metric_queue_minutes_between($1, $2, $4::jsonb) m
WHERE m.pop_messages > 0 AND ($5::text[] IS NULL OR m.queue_name = ANY($5))
GROUP BY 1, 2 ORDER BY 1 DESC, 2 DESC;

-- name: queue_pop_lags
-- How long messages of each queue had waited when they were popped, over all the time.
SELECT m.queue_name, sum(m.pop_messages)::bigint AS pop_messages, sum(m.lag_ms) AS lag_ms,
    max(m.lag_max_ms) AS lag_max_ms
FROM queen.metric_queue_minutes_between($1, $2, $3::jsonb) m
GROUP BY m.queue_name HAVING sum(m.pop_messages) > 0 ORDER BY m.queue_name;

-- name: parked_series
-- How many pops waited for queues ($5: these alone) at each worker, in buckets of so many minutes, oldest first.
SELECT date_bin(make_interval(mins => $3), m.at, 'epoch') AS bucket, m.queue_name, m.host, m.worker_id,
    sum(m.parked * m.seconds) AS parked_seconds
FROM queen.metric_queue_minutes_between($1, $2, $4::jsonb) m
WHERE $5::text[] IS NULL OR m.queue_name = ANY($5)
GROUP BY 1, 2, 3, 4 HAVING sum(m.parked) > 0 ORDER BY 1, 2, 3, 4;

-- name: last_flushes
-- The last flush of each worker that is still there: seen within so many seconds.
SELECT m.*, extract(epoch FROM clock_timestamp() - l.seen_at)::float8 AS age
FROM queen.metric_lives l JOIN queen.metric_minutes m ON m.life = l.life AND m.flush = l.flush
WHERE l.seen_at > clock_timestamp() - make_interval(secs => $1);

-- name: last_queue_flushes
-- Rates per minute of queues as of the last flush of each worker that is still there, and how old that is.
SELECT m.queue_name,
    sum(m.push_requests * 60 / m.seconds)::float8 AS push_requests,
    sum(m.push_messages * 60 / m.seconds)::float8 AS push_messages,
    sum(m.pop_messages * 60 / m.seconds)::float8 AS pop_messages,
    sum(m.pop_empty * 60 / m.seconds)::float8 AS pop_empty,
    sum(m.ack_success * 60 / m.seconds)::float8 AS ack_success,
    sum(m.ack_failed * 60 / m.seconds)::float8 AS ack_failed,
    sum(m.transactions * 60 / m.seconds)::float8 AS transactions,
    sum(m.lag_ms)::float8 AS lag_ms, sum(m.pop_messages)::bigint AS popped, max(m.lag_max_ms) AS lag_max_ms,
    sum(m.parked)::float8 AS parked, extract(epoch FROM clock_timestamp() - min(l.seen_at))::float8 AS age
FROM queen.metric_lives l JOIN queen.metric_queue_minutes m ON m.life = l.life AND m.flush = l.flush
WHERE l.seen_at > clock_timestamp() - make_interval(secs => $1)
GROUP BY m.queue_name;

-- name: retention_series
-- What retention, eviction and expiry removed (from one queue), in buckets of so many minutes, oldest first.
SELECT date_bin(make_interval(mins => $3), at, 'epoch') AS bucket,
    coalesce(sum(messages) FILTER (WHERE kind = 'retention'), 0)::bigint AS retention,
    coalesce(sum(messages) FILTER (WHERE kind = 'completed_retention'), 0)::bigint AS completed_retention,
    coalesce(sum(messages) FILTER (WHERE kind IN ('max_wait_time_eviction', 'ttl_expiration')), 0)::bigint AS eviction,
    sum(messages)::bigint AS messages, count(*) AS events
FROM queen.retention_history
WHERE at >= $1 AND at < $2 AND ($4::text = '' OR queue_name = $4)
GROUP BY 1 ORDER BY 1;
