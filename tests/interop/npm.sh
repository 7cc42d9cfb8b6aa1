# Sourced by what prints where a package of npm is. `installed NAME WHAT FILE [COMMAND]` installs what package-lock.json in the
# folder NAME beside this names below target/ on first use, one process at a time, runs COMMAND there, and prints the path of FILE there.
# Exit status: 0 there, 77 cannot be installed here.
set -u
here=$(cd "$(dirname "$0")" && pwd)

installed() {
    kit="$here/$1" folder="$here/../../target/interop-$1"
    mkdir -p "$folder"
    if (
        flock 9
        cmp -s "$kit/package-lock.json" "$folder/installed" && exit 0
        cp "$kit/package.json" "$kit/package-lock.json" "$folder" && cd "$folder" &&
            npm ci --ignore-scripts --no-audit --no-fund --loglevel=error &&
            ${4:-true} &&
            cp "$kit/package-lock.json" installed
    ) 9>"$folder.lock" >&2; then
        echo "$folder/$3"
    else
        echo "SKIP: $2 cannot be installed (npm and its registry are needed)"
        exit 77
    fi
}
