#!/bin/sh
# Run once by the image of PostgreSQL, when the primary is made: the role and the slot that the standby uses. From the next
# transaction on, a commit waits until the standby has it on disk; so this script must be the last of its kind.
set -eu
password=$(cat "${REPLICATION_PASSWORD_FILE:-/run/secrets/replication_password}")
psql --no-psqlrc --set ON_ERROR_STOP=1 --set password="$password" \
  --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
CREATE ROLE replicator WITH REPLICATION LOGIN PASSWORD :'password';
SELECT pg_create_physical_replication_slot('standby');
SQL
printf 'host replication replicator all scram-sha-256\n' >> "$PGDATA/pg_hba.conf"
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (standby)';
SELECT pg_reload_conf();
SQL
