#!/bin/sh
# Starts a Redis that only its users may use: `start.sh RULES PASSWORDS ACL COMMAND...`
#
# RULES says who may do what, PASSWORDS is a folder with a file for each user, and ACL, which is written here, is what
# Redis reads (`--aclfile`): the rules with the hashes of the passwords. COMMAND is the server's. Nobody comes in without
# a password. With CERTIFICATES, a folder with tls.crt, tls.key and ca.crt, and SOCKET, where the server listens for this
# script, the server reads those files again when they have changed.
set -eu
umask 077
rules=$1 passwords=$2 acl=$3
shift 3

echo "user default reset off" > "$acl"
# The lines of a user are one rule. {ns} is what every key of Baton's begins with; the hash in it has 32 characters.
awk '
  !/^#/ && NF { user = $1; $1 = ""; found[user] = found[user] $0 }
  END { for (user in found) print user found[user] }
' "$rules" | sed 's/{ns}/kv:{????????????????????????????????}:/g' | while read -r user rule; do
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
exec "$@"
