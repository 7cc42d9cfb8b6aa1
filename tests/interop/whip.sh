#!/bin/sh
# Prints where a WHIP client of others (the package whip-whep) is, as one module for a page; see npm.sh.
. "$(dirname "$0")/npm.sh"
installed whip "the WHIP client" node_modules/whip-whep/whip.js
