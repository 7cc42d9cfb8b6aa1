#!/bin/sh
# Speech with OpenAI's own Python client: openai.sh URL
# Exit status: 0 works, 1 does not, 77 cannot run here.
. "$(dirname "$0")/python.sh"
python openai 'openai>=1.99,<3' openai_speech.py "$@"
