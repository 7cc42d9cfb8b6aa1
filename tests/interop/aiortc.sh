#!/bin/sh
# One call with aiortc: aiortc.sh URL [ARGUMENTS OF aiortc_call.py]
# Exit status: 0 heard, 1 not, 77 cannot run here.
. "$(dirname "$0")/python.sh"
python aiortc aiortc_call.py "$@"
