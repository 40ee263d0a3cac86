-- Applications of `queen.tasks`: what their workers have written as keys of their namespaces.

-- name: task_app_keys
-- The application ($2) and the workers ($3: a prefix) of one namespace, or of all (''), which are found one by one: a
-- namespace may have millions of other keys.
WITH RECURSIVE namespaces AS (
    (SELECT namespace FROM queen.kv WHERE $1 = '' OR namespace = $1 ORDER BY namespace LIMIT 1)
    UNION ALL
    SELECT (SELECT k.namespace FROM queen.kv k WHERE k.namespace > n.namespace ORDER BY k.namespace LIMIT 1)
    FROM namespaces n WHERE n.namespace IS NOT NULL AND $1 = ''
)
SELECT n.namespace, k.key, k.value, k.updated_at FROM namespaces n
CROSS JOIN LATERAL (
    SELECT key, value, updated_at FROM queen.kv
    WHERE namespace = n.namespace AND key = $2 AND (expires_at IS NULL OR expires_at > clock_timestamp())
    UNION ALL
    SELECT key, value, updated_at FROM queen.kv
    WHERE namespace = n.namespace AND key >= $3 AND key < $3 || chr(1114111)
        AND (expires_at IS NULL OR expires_at > clock_timestamp())
) k
ORDER BY n.namespace, k.key;
