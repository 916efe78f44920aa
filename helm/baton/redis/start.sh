#!/bin/sh
# Starts a Redis that only its users may use: `start.sh RULES PASSWORDS ACL COMMAND...`
#
# RULES says who may do what, PASSWORDS is a folder with a file for each user, and ACL, which is written here, is what
# Redis reads (`--aclfile`): the rules with the hashes of the passwords. COMMAND is the server's. Nobody comes in without
# a password. With CERTIFICATES, a folder with tls.crt, tls.key and ca.crt, and SOCKET, where the server listens for this
# script, the server reads those files again when they have changed. With KEEP, the folder of its data, and SOCKET, accounts
# outlive the server: what else is in that folder is forgotten first.
set -eu
umask 077
rules=$1 passwords=$2 acl=$3
shift 3

echo "user default reset off" > "$acl"
# The lines of a user are one rule. {ns} is what the keys of a model begin with; the hash in it has 32 characters. {es} is
# what the keys of an endpoint begin with.
awk '
  !/^#/ && NF { user = $1; $1 = ""; found[user] = found[user] $0 }
  END { for (user in found) print user found[user] }
' "$rules" | sed 's/{ns}/kv:{????????????????????????????????}:/g; s/{es}/kv:{endpoint:*}:/g' | while read -r user rule; do
  password=$(cat "$passwords/$user" 2>/dev/null) || { echo "no password for user $user in $passwords" >&2; exit 1; }
  case $password in
    "" | *[!A-Za-z0-9._~-]*)
      echo "the password of user $user is empty, or has other characters than A-Z, a-z, 0-9 and -._~" >&2
      exit 1
      ;;
  esac
  [ "$user" = default ] && : > "$acl" # Redis takes no user twice
  echo "user $user reset on #$(printf %s "$password" | sha256sum | cut -c 1-64) $rule" >> "$acl"
done

# Has the server read its certificates again, now and then, by a user that may do nothing else.
follow() {
  seen=$2
  while sleep "${LOOK_S:-30}" && kill -0 $$ 2> /dev/null; do # as long as the server is there
    found=$(cat "$CERTIFICATES"/* | cksum)
    [ "$found" = "$seen" ] && continue
    said=$(REDISCLI_AUTH=$1 redis-cli -s "$SOCKET" --user certificates config set tls-cert-file "$CERTIFICATES/tls.crt" \
      tls-key-file "$CERTIFICATES/tls.key" tls-ca-cert-file "$CERTIFICATES/ca.crt" 2>&1) || true
    echo "certificates have changed: $said"
    [ "$said" = OK ] && seen=$found
  done
}

if [ -n "${CERTIFICATES:-}" ]; then
  seen=$(cat "$CERTIFICATES"/* | cksum)
  password=$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)
  echo "user certificates reset on #$(printf %s "$password" | sha256sum | cut -c 1-64) -@all +config|set" >> "$acl"
  follow "$password" "$seen" &
fi

# What has been kept for accounts has the rest in it, too: leases and an index of before, which lack what was written in the
# last second. Nobody may see those, and without the boot token in them all members begin anew, as with an empty server.
forget() {
  "$1" --port 0 --unixsocket "$SOCKET" --save "" --appendonly yes --dir "$KEEP" --maxmemory 0 &
  server=$!
  until state=$(redis-cli -s "$SOCKET" ping 2>&1) && [ "$state" = PONG ]; do # it reads its file first
    kill -0 $server 2> /dev/null || { echo "the server does not read what is in $KEEP: $state" >&2; exit 1; }
    sleep 0.2
  done
  gone=$(redis-cli -s "$SOCKET" eval "
    local kept, cursor, gone = {acct = true, use = true, held = true, hist = true, adapters = true}, '0', 0
    repeat
      local page = redis.call('scan', cursor, 'count', 1000)
      cursor = page[1]
      for _, key in ipairs(page[2]) do
        if not kept[string.match(key, '^kv:{[^}]*}:(%w+)')] then gone = gone + redis.call('unlink', key) end
      end
    until cursor == '0'
    return gone" 0)
  # Written anew the file has no MULTI, whose commands a server with users drops when it reads its file: its reader is the
  # user `default`, who may do nothing (seen with Redis 7.0.15).
  redis-cli -s "$SOCKET" bgrewriteaof > /dev/null
  until redis-cli -s "$SOCKET" info persistence | grep -q "^aof_rewrite_in_progress:0" &&
    redis-cli -s "$SOCKET" info persistence | grep -q "^aof_rewrite_scheduled:0"; do
    sleep 0.2
  done
  redis-cli -s "$SOCKET" info persistence | grep -q "^aof_last_bgrewrite_status:ok" || {
    echo "the server cannot write what is in $KEEP anew: is the volume full?" >&2
    exit 1
  }
  echo "kept accounts, and forgot $gone keys of leases and the index"
  redis-cli -s "$SOCKET" shutdown nosave || true
  wait $server || true
}

if [ -n "${KEEP:-}" ] && [ -e "$KEEP/appendonlydir" ]; then
  forget "$1"
fi
exec "$@"
