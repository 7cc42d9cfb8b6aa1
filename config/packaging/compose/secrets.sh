#!/bin/sh
# Makes the secrets of compose.yaml, once: each a file that this user and the containers may read.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
for name in antiphon_token turn_password grafana; do
    [ -s "secrets/$name" ] || { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n' > "secrets/$name"; }
    chmod 644 "secrets/$name"
done
