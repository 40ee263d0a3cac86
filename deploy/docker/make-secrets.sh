#!/bin/sh
# Makes the secrets of compose.production.yaml, once; those that exist stay.
set -eu
directory=$(dirname "$0")/secrets
umask 077
mkdir -p "$directory"
# Compose mounts these files as they are, and the images read them as users other than their owner.
chmod 0711 "$directory"
for name in pg_password replication_password redis_password sync_secret jwt_secret grafana_password; do
  [ -s "$directory/$name" ] && continue
  od -An -tx1 -N32 /dev/urandom | tr -d ' \n' > "$directory/$name"
  chmod 0444 "$directory/$name"
  echo "made $directory/$name"
done
if [ ! -s "$directory/database_url" ]; then
  # %2C is the comma between the hosts: a plain one would separate two shards.
  printf 'postgresql://queen:%s@/queen?host=postgres%%2Cpostgres-standby&target_session_attrs=primary' \
    "$(cat "$directory/pg_password")" > "$directory/database_url"
  chmod 0444 "$directory/database_url"
  echo "made $directory/database_url"
fi
