#!/bin/sh
# Prints where axe-core, the checker of accessibility, is: axe.sh
# Exit status: 0 there, 77 cannot be installed here.
. "$(dirname "$0")/python.sh"
python axe_core_python axe_path.py
