#!/bin/sh
# Starts a standby of PRIMARY_HOST; the first time it copies the primary.
set -eu
: "${PRIMARY_HOST:?the host name of the primary}"
: "${PGDATA:?the directory of the data}"
password=$(cat "$REPLICATION_PASSWORD_FILE")
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  # A copy that was broken off is begun again.
  rm -rf "$PGDATA.partial"
  mkdir -p "$(dirname "$PGDATA")"
  PGPASSWORD=$password pg_basebackup --pgdata "$PGDATA.partial" --wal-method stream --checkpoint fast --write-recovery-conf \
    --slot standby --dbname "host=$PRIMARY_HOST port=${PRIMARY_PORT:-5432} user=replicator application_name=standby"
  # Once it is promoted there is no standby that its commits could wait for.
  echo "synchronous_standby_names = ''" >> "$PGDATA.partial/postgresql.auto.conf"
  chmod 0700 "$PGDATA.partial"
  rm -rf "$PGDATA"
  mv "$PGDATA.partial" "$PGDATA"
fi
exec "$@"
