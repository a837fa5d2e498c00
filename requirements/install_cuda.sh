#!/usr/bin/env bash
# Installs cuda.lock into an environment and builds Transformer Engine's torch extension against it.
#   requirements/install_cuda.sh VENV           for GPUs
#   requirements/install_cuda.sh VENV quick     for `make cuda-check`: the extension is built sooner, and runs slower
# It takes about 9 GB, g++ and no GPU. vLLM, torch and Transformer Engine's kernels come as wheels; the compiler and the
# headers of CUDA come as wheels too, so that they are of the same release as torch's libraries. The extension is 33 files
# that all read torch's headers: 20 to 30 minutes of one core (MAX_JOBS: more cores); `quick` compiles them as one file
# with little optimisation, in 3.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1/bin/python
lock=$here/cuda.lock
extension=$(grep '^transformer-engine-torch==' "$lock")

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    { echo "install_cuda.sh: cuda.lock is for Python 3.12 or newer, and $python is older" >&2; exit 2; }
"$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
    { echo "install_cuda.sh: $python has no headers (Python.h); install python3-dev" >&2; exit 2; }
command -v g++ >/dev/null || { echo "install_cuda.sh: g++ is missing" >&2; exit 2; }
# The public index alone: a folder or an index with torch's CPU build would win.
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX UV_EXTRA_INDEX_URL
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CONFIG=1 UV_NO_CACHE=1

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
grep -v '^transformer-engine-torch==' "$lock" >"$source/wheels.lock"
"$here/uv_or_pip.sh" "$1" --no-deps --requirement "$source/wheels.lock"

site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export CUDA_HOME=$site/nvidia/cu13 NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1
# Without build isolation, since an isolated build compiles against the newest torch instead of the pinned one.
build=(--quiet --no-deps --no-build-isolation)
"$python" -m pip download "${build[@]}" --no-binary transformer-engine-torch --dest "$source" "$extension"
tar -xzf "$source"/*.tar.gz -C "$source" --strip-components=1
if [[ ${2:-} == quick ]]; then
    find "$source/csrc" -name '*.cpp' | sort | while read -r file; do
        mv "$file" "$file.part"
        echo "#include \"$file.part\"" >>"$source/csrc/whole.cpp"
    done
    sed -i 's/"-O3"/"-O1"/' "$source/build_tools/pytorch.py"
fi
"$python" -m pip install "${build[@]}" "$source"
"$python" -m pip check
