#!/bin/sh
# One call with aiortc: aiortc.sh URL [ARGUMENTS OF aiortc_call.py]
# Makes a virtual environment below target/ on first use. Exit status: 0 heard, 1 not, 77 cannot run here.
here=$(cd "$(dirname "$0")" && pwd)
venv="$here/../../target/interop-venv"
if ! "$venv/bin/python" -c 'import aiortc' 2>/dev/null; then
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet 'aiortc>=1.9,<2'; } >&2; then
        echo "SKIP: aiortc cannot be installed (python3-venv and a PyPI mirror are needed)"
        exit 77
    fi
fi
exec "$venv/bin/python" "$here/aiortc_call.py" "$@"
