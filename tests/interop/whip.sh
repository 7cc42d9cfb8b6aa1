#!/bin/sh
# Prints where a WHIP client of others (the package whip-whep) is, as one module for a page: whip.sh
# Installs what package-lock.json names below target/ on first use, one process at a time.
# Exit status: 0 there, 77 cannot be installed here.
set -u
here=$(cd "$(dirname "$0")" && pwd)/whip
folder="$here/../../../target/interop-whip"

install() {
    mkdir -p "$folder"
    (
        flock 9
        cmp -s "$here/package-lock.json" "$folder/installed" && exit 0
        cp "$here/package.json" "$here/package-lock.json" "$folder" && cd "$folder" &&
            npm ci --ignore-scripts --no-audit --no-fund --loglevel=error &&
            cp "$here/package-lock.json" installed
    ) 9>"$folder.lock" >&2
}

if ! install; then
    echo "SKIP: the WHIP client cannot be installed (npm and its registry are needed)"
    exit 77
fi
echo "$folder/node_modules/whip-whep/whip.js"
