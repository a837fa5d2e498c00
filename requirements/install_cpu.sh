#!/usr/bin/env bash
# Installs cpu.lock into an environment: requirements/install_cpu.sh VENV
# torch comes as its CPU build from an index or a folder of pip's configuration, or else from PyTorch's index. The public
# index has the CUDA build only: where nothing else is reached that one is taken, with the libraries that it loads. It
# computes on CPUs too, and is a download of 2.7 GB instead of 0.2, and 3.9 GB on the disk instead of 0.8.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
torch=$(grep '^torch==' "$here/cpu.lock")
pip=("$1/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps)
pytorch_index=(--index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 15)

if ! "$1/bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '${torch#torch==}'" 2>/dev/null; then
    "${pip[@]}" "$torch+cpu" 2>/dev/null || "${pip[@]}" "${pytorch_index[@]}" "$torch+cpu" 2>/dev/null || {
        echo "no index that is reached has torch's CPU build: its CUDA build comes from the public one (2.7 GB)" >&2
        "$here/uv_or_pip.sh" "$1" --constraint "$here/cuda.lock" "$torch"
    }
fi
"$here/uv_or_pip.sh" "$1" --no-deps --requirement "$here/cpu.lock"

# vLLM's module of Qwen3.5 imports torchvision, which has to be of torch's build: another one breaks imports of transformers.
build=$("$1/bin/python" -c "import torch; print('+cpu' * torch.__version__.endswith('+cpu'))")
vision=$(grep '^torchvision==' "$here/cuda.lock")$build
"${pip[@]}" "$vision" 2>/dev/null || "${pip[@]}" "${pytorch_index[@]}" "$vision" 2>/dev/null ||
    echo "no index that is reached has $vision, without which vLLM serves no Qwen3.5; everything else works" >&2
