#!/bin/sh
# Installs the Python clients, so that no test has to: prepare.sh
. "$(dirname "$0")/python.sh"
prepare
