#!/bin/sh
# Speech with OpenAI's own Python client: openai.sh URL
# Exit status: 0 works, 1 does not, 77 cannot run here.
. "$(dirname "$0")/python.sh"
python openai openai_speech.py "$@"
