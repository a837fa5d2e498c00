#!/usr/bin/env bash
# Installs cuda.lock into an environment of Python 3.12 and builds Transformer Engine's torch extension against it.
#   requirements/install_cuda.sh VENV    about 9 GB; the extension takes 20 to 30 minutes of one core (MAX_JOBS: more)
# It needs g++ and no GPU. vLLM, torch and Transformer Engine's kernels come as wheels; the compiler and the headers of
# CUDA come as wheels too, so that they are of the same release as torch's libraries.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1/bin/python
lock=$here/cuda.lock
extension=$(grep '^transformer-engine-torch==' "$lock")

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    { echo "install_cuda.sh: cuda.lock is for Python 3.12, and $python is another one" >&2; exit 2; }
# The public index alone: a folder or an index with torch's CPU build would win.
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -m pip install --quiet --no-deps -r <(grep -v '^transformer-engine-torch==' "$lock")
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# Without build isolation, since an isolated build compiles against the newest torch instead of the pinned one.
NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 CUDA_HOME=$site/nvidia/cu13 \
    "$python" -m pip install --quiet --no-deps --no-build-isolation "$extension"
"$python" -m pip check
