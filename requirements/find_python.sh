#!/usr/bin/env bash
# Prints the path of a Python that the locks fit: requirements/find_python.sh [PYTHON]
# PYTHON: the only one that is considered. Otherwise 3.12 or 3.13 (for newer ones some packages have no wheels), from the
# PATH or from pyenv, whose shims do not start a version that is not chosen. Where there is none uv downloads 3.12.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# Distributions split ensurepip off, and an interpreter that was built without a library of the system lacks its module.
can_make_environment() {
    "$1" -c 'import sys, bz2, ctypes, ensurepip, lzma, sqlite3, ssl; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

download_python() {
    local uv folder
    if ! uv=$(command -v uv); then
        folder=$(mktemp -d)
        # shellcheck disable=SC2064 # the folder of now
        trap "rm -rf '$folder'" EXIT
        python3 -m venv "$folder" >&2 || return
        "$folder/bin/python" -m pip --disable-pip-version-check install --quiet "$(grep '^uv==' "$here/dev.lock")" || return
        uv=$folder/bin/uv
    fi
    "$uv" python install 3.12 >&2 && "$uv" python find --managed-python 3.12
}

if [[ -n ${1:-} ]]; then
    can_make_environment "$1" && echo "$1" && exit
    echo "Python 3.12 or newer is needed, with pip and all of its modules, and $1 is not one" >&2
    exit 2
fi
for minor in 12 13; do
    readarray -t candidates < <(type -ap "python3.$minor"
        printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python | sort -rV)
    for python in "${candidates[@]}"; do
        can_make_environment "$python" && echo "$python" && exit
    done
done
echo "there is no Python 3.12 or 3.13 on the PATH or in pyenv: uv downloads one" >&2
python=$(download_python) && can_make_environment "$python" && echo "$python" && exit
echo "no Python 3.12 could be downloaded; install one (on Debian with its -venv package), or give its path: make PYTHON=..." >&2
exit 2
