#!/bin/sh
# Prints where TypeScript's compiler is: typescript.sh
# Installs what package-lock.json names below target/ on first use, one process at a time.
# Exit status: 0 there, 77 cannot be installed here.
set -u
here=$(cd "$(dirname "$0")" && pwd)/typescript
folder="$here/../../../target/interop-typescript"

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
    echo "SKIP: TypeScript cannot be installed (npm and its registry are needed)"
    exit 77
fi
echo "$folder/node_modules/.bin/tsc"
