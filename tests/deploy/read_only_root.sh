#!/bin/sh
# read_only_root.sh DIRECTORY COMMAND...: runs the command as the user of the image, on a root that is read-only except for
# DIRECTORY and a directory of temporary files: what `docker run --read-only --tmpfs /tmp` does.
# CLOSED are directories that this user may not enter, EXPOSED those in them that hold the programs; one per line.
set -eu
directory=$1
shift
# shellcheck disable=SC2016 # The inner shell expands them.
exec unshare --mount --propagation private sh -c '
  set -eu
  directory=$1
  shift
  root=$directory.root
  mkdir "$root"
  mount --bind / "$root"
  mount -o remount,ro,bind "$root"
  for closed in $CLOSED; do
    mount -t tmpfs -o mode=755 tmpfs "$root$closed"
  done
  for exposed in $EXPOSED; do
    mkdir -p "$root$exposed"
    mount --bind "$exposed" "$root$exposed"
    mount -o remount,ro,bind "$root$exposed"
  done
  mkdir -p "$root$directory"
  mount --bind "$directory" "$root$directory"
  mount -t tmpfs -o mode=1777 tmpfs "$root/var/tmp"
  # initdb wants its user to have a name.
  echo "queen:x:10001:10001::/var/lib/queen:/usr/sbin/nologin" | cat /etc/passwd - > "$root/var/tmp/passwd"
  mount --bind "$root/var/tmp/passwd" "$root/etc/passwd"
  mount --rbind /proc "$root/proc"
  mount --rbind /dev "$root/dev"
  exec chroot "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all \
    env TMPDIR=/var/tmp PYTHONDONTWRITEBYTECODE=1 "$@"
' sh "$directory" "$@"
