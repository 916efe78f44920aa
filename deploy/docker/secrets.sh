#!/bin/sh
# Draws the secrets of the compose file, once: `sh deploy/docker/secrets.sh`
#
# They go into `.env` beside it, which compose reads by itself, and which nobody else may read. What is there stays.
set -eu
umask 077
file=$(dirname "$0")/.env
touch "$file"
for name in CLUSTER_SECRET RAY_AUTH_TOKEN BATON_ROUTER_CACHE_SECRET \
  REDIS_ROUTER_PASSWORD REDIS_WORKER_PASSWORD REDIS_CONTROLLER_PASSWORD REDIS_DOCTOR_PASSWORD; do
  grep -q "^$name=" "$file" || echo "$name=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" >> "$file"
done
