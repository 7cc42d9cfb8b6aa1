# Runs a Python program with the packages of requirements.txt; read by the other scripts: python NAME PROGRAM [ARGUMENTS]
# Makes their virtual environment below target/ on first use, one process at a time. Exit status: the program's, 77
# where the packages cannot be installed: the caller counts that as a skip, or fails where NAME is required.
here=$(cd "$(dirname "$0")" && pwd)
venv="$here/../../target/interop-venv"

# Whether all of them are there, installed now if need be.
prepare() {
    mkdir -p "$(dirname "$venv")"
    (
        flock 9
        cmp -s "$here/requirements.txt" "$venv/installed" && exit 0
        rm -rf "$venv"
        python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --requirement "$here/requirements.txt" &&
            cp "$here/requirements.txt" "$venv/installed"
    ) 9>"$venv.lock" >&2
}

python() {
    name=$1 program=$2
    shift 2
    if ! prepare || ! "$venv/bin/python" -c "import $name"; then
        echo "SKIP: $name cannot be installed (python3-venv and a PyPI mirror are needed)"
        exit 77
    fi
    exec "$venv/bin/python" "$here/$program" "$@"
}
