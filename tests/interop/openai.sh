#!/bin/sh
# Speech with OpenAI's own Python client: openai.sh URL
# Makes a virtual environment below target/ on first use. Exit status: 0 works, 1 does not, 77 cannot run here.
here=$(cd "$(dirname "$0")" && pwd)
# Not the one of aiortc.sh: both may be made at the same time.
venv="$here/../../target/interop-venv-openai"
if ! "$venv/bin/python" -c 'import openai' 2>/dev/null; then
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet 'openai>=1.99,<3'; } >&2; then
        echo "SKIP: the openai client cannot be installed (python3-venv and a PyPI mirror are needed)"
        exit 77
    fi
fi
exec "$venv/bin/python" "$here/openai_speech.py" "$@"
