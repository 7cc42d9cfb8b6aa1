#!/bin/sh
# Prints where TypeScript's compiler is, see npm.sh.
. "$(dirname "$0")/npm.sh"
installed typescript TypeScript node_modules/.bin/tsc
