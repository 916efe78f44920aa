#!/bin/sh
# Starts a Redis that only its users may use: `start.sh RULES PASSWORDS ACL COMMAND...`
#
# RULES says who may do what, PASSWORDS is a folder with a file for each user, and ACL, which is written here, is what
# Redis reads (`--aclfile`): the rules with the hashes of the passwords. COMMAND is the server's. Nobody comes in without
# a password.
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
exec "$@"
