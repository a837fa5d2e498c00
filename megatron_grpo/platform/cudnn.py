"""The one cuDNN of a process: the one that torch brings, which Transformer Engine would look for last.

With another one Transformer Engine attends without a fused kernel, and memory grows with the square of a sequence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

HOME = "CUDNN_HOME"  # the first place where Transformer Engine looks
LIBRARY = "libcudnn.so"


def choose_cudnn() -> None:
    """Point Transformer Engine to torch's cuDNN, before its import."""
    # It looks in CUDNN_HOME, CUDNN_PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda and LD_LIBRARY_PATH, and then in the
    # packages of this environment. A torch that was built with the system's cuDNN brings no package.
    folder = find_cudnn_folder()
    if folder is None or os.environ.get(HOME) == folder:
        return
    if HOME in os.environ:
        logger.warning("%s=%s becomes %s, the cuDNN of torch", HOME, os.environ[HOME], folder)
    os.environ[HOME] = folder


def find_cudnn_folder() -> str | None:
    """Find the folder of the package nvidia-cudnn; None: it is not installed."""
    spec = None if find_spec("nvidia") is None else find_spec("nvidia.cudnn")
    folders: Iterable[str] = (spec.submodule_search_locations if spec else None) or ()
    return next((folder for folder in folders if any(Path(folder, "lib").glob(f"{LIBRARY}*"))), None)


def require_one_cudnn(maps: Path = Path("/proc/self/maps")) -> None:
    """Require that this process has loaded at most one cuDNN; RuntimeError names them."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if f"/{LIBRARY}" in line}
    files = sorted({os.path.realpath(path) for path in paths})
    if len(files) > 1:
        raise RuntimeError(
            f"this process has loaded {len(files)} cuDNN, {' and '.join(files)}, and Transformer Engine would attend "
            f"without a fused kernel: take the system's out of LD_LIBRARY_PATH, or set {HOME} to that of torch"
        )
