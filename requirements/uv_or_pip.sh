#!/usr/bin/env bash
# Installs with uv, in a fraction of pip's time; with pip where uv cannot be had, or does not find what pip finds with its
# own configuration: requirements/uv_or_pip.sh VENV ARGUMENT...     arguments that `uv pip install` and `pip install` take
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1/bin/python
shift
pip=("$python" -m pip --disable-pip-version-check --quiet)
uv=("$python" -m uv --quiet pip install --python "$python" --compile-bytecode)

mirror=$("${pip[@]}" config list | sed -n "s/.*\.index-url='\(.*\)'/\1/p" | tail -1)
if [[ -n $mirror && -z ${UV_DEFAULT_INDEX:-} ]]; then
    export UV_DEFAULT_INDEX=$mirror
fi
if "${pip[@]}" install "$(grep '^uv==' "$here/dev.lock")" && "${uv[@]}" "$@"; then
    exit
fi
echo "uv did not install them: now pip tries, which takes longer" >&2
"${pip[@]}" install "$@"
