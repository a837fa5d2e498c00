"""Checks the CUDA half of the project on a machine without a GPU; run by the Python of the CUDA environment.

    .venv-cuda/bin/python -m tests.cuda [options of pytest]

Builds the stand-in libraries, then runs the tests of each mode in a process of its own, since libraries are preloaded
when a process starts: nvml (NVML shows one H100, but there is no device), null (a device whose kernels do nothing). The
last tests compute on the CPU, with the Python and the packages of the CUDA environment.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.cuda.device.build import DEVICE, build

HERE = Path(__file__).parent
ON_CPU = HERE.parent / "parity" / "test_published_adapters.py"
MODE = "CUDA_CHECK_MODE"
"""Environment variable with the name of the mode; without it no test of this folder is collected."""


def main() -> int:
    """Run all tests; returns the first exit code of pytest that is not 0."""
    libraries = Path(sys.prefix) / "stand-ins"
    build(libraries)
    # Variables of the machine that would choose other libraries or a real GPU have no place here.
    common = {"LD_LIBRARY_PATH": str(libraries), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    common["OMP_NUM_THREADS"] = "1"  # threads do not survive the fork of a test
    modes = {
        "nvml": {"CUDA_VISIBLE_DEVICES": ""},
        "null": {
            "NULL_DEVICE": "1",
            "LD_PRELOAD": str(libraries / DEVICE),
            "TORCHDYNAMO_DISABLE": "1",  # compiled code would be loaded by the driver
            "NVTE_TORCH_COMPILE": "0",
            "VLLM_USE_DEEP_GEMM": "0",  # so would be its kernels, which are compiled when they are first used
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
        },
    }
    codes = []
    for mode, variables in modes.items():
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= common | variables | {MODE: mode}
        command = [sys.executable, "-m", "pytest", str(HERE / mode), *sys.argv[1:]]
        codes.append(subprocess.run(command, env=environment, check=False).returncode)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(ON_CPU), *sys.argv[1:]]
    codes.append(subprocess.run(command, env=environment, check=False).returncode)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
