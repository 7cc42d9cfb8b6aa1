#!/bin/sh
# Prints where Pipecat's own client for browsers is, as one module for a page; see npm.sh.
. "$(dirname "$0")/npm.sh"

bundle() {
    printf '%s\n' 'export { PipecatClient } from "@pipecat-ai/client-js";' \
        'export { SmallWebRTCTransport, WavMediaManager } from "@pipecat-ai/small-webrtc-transport";' |
        node_modules/.bin/esbuild --bundle --format=esm --log-level=error --outfile=pipecat.js
}

installed pipecat "Pipecat's client" pipecat.js bundle
