#!/bin/sh
# Prints where Pipecat's own client for browsers is, as one module for a page: pipecat.sh
# Installs what package-lock.json names below target/ on first use, one process at a time.
# Exit status: 0 there, 77 cannot be installed here.
set -u
here=$(cd "$(dirname "$0")" && pwd)/pipecat
folder="$here/../../../target/interop-pipecat"

install() {
    mkdir -p "$folder"
    (
        flock 9
        cmp -s "$here/package-lock.json" "$folder/installed" && exit 0
        cp "$here/package.json" "$here/package-lock.json" "$folder" && cd "$folder" &&
            npm ci --ignore-scripts --no-audit --no-fund --loglevel=error &&
            printf '%s\n' 'export { PipecatClient } from "@pipecat-ai/client-js";' \
                'export { SmallWebRTCTransport, WavMediaManager } from "@pipecat-ai/small-webrtc-transport";' |
            node_modules/.bin/esbuild --bundle --format=esm --log-level=error --outfile=pipecat.js &&
            cp "$here/package-lock.json" installed
    ) 9>"$folder.lock" >&2
}

if ! install; then
    echo "SKIP: Pipecat's client cannot be installed (npm and its registry are needed)"
    exit 77
fi
echo "$folder/pipecat.js"
