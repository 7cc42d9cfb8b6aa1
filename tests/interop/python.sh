# Runs a Python program with a package of PyPI; read by the other scripts: python NAME REQUIREMENT PROGRAM [ARGUMENTS]
# Makes a virtual environment of NAME's own below target/ on first use: two may be made at the same time. Exit status:
# the program's, 77 where the package cannot be installed.
here=$(cd "$(dirname "$0")" && pwd)
python() {
    name=$1 requirement=$2 program=$3
    shift 3
    venv="$here/../../target/interop-venv-$name"
    if ! "$venv/bin/python" -c "import $name" 2>/dev/null; then
        if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet "$requirement"; } >&2; then
            echo "SKIP: $name cannot be installed (python3-venv and a PyPI mirror are needed)"
            exit 77
        fi
    fi
    exec "$venv/bin/python" "$here/$program" "$@"
}
