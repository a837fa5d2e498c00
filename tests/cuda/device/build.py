"""Builds stand-ins for NVIDIA's driver, runtime, cuBLAS, NVRTC and NVML with gcc, for machines without a GPU."""

import re
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent
PACKAGES = Path(sysconfig.get_paths()["purelib"])
CUDA = PACKAGES / "nvidia" / "cu13"
"""Headers and libraries of CUDA, which come as Python packages."""
REPLACED = ("libcudart.so", "libcublas.so", "libcublasLt.so", "libnvrtc.so")
"""Libraries whose exported functions all get stand-ins. The functions with which compiled code registers its kernels
(`__cuda...`) stay the runtime's, except those that launch a kernel."""
LAUNCHES = {"__cudaGetKernel", "__cudaLaunchKernel"}
DRIVER, NVML, DEVICE = "libcuda.so.1", "libnvidia-ml.so.1", "libnulldevice.so"


def build(folder: Path) -> None:
    """Write the three libraries into a folder, which is made.

    Raises:
        subprocess.CalledProcessError: gcc, g++ or nm failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    driver = (SOURCES / "driver.c").read_text()
    header = (CUDA / "include" / "cuda.h").read_text()
    # Functions, and the versions that their names stand for.
    names = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", header))
    names |= set(re.findall(r"^#\s*define\s+cu\w+\s+(cu\w+)\s*$", header, re.MULTILINE))
    names -= _list_defined(driver)
    _compile(folder, DRIVER, ["gcc"], [_write_stub(folder, "driver.c", driver + _functions(names, "return answer();"))])
    _compile(folder, NVML, ["gcc"], [SOURCES / "nvml.c"])
    sources = [SOURCES / "runtime.cpp", SOURCES / "libraries.c"]
    written = set().union(*(_list_defined(file.read_text()) for file in sources))
    exported = set().union(*(_list_exported(library) for library in REPLACED))
    plain = {name for name in exported if not name.startswith("__") or name in LAUNCHES} - written
    objects = []
    for file in (*sources, _write_stub(folder, "success.c", _functions(plain, "return 0;"))):
        objects.append(folder / f"{file.stem}.o")
        subprocess.run([*_compiler(file), "-c", f"-I{CUDA / 'include'}", "-o", objects[-1], file], check=True)
    _compile(folder, DEVICE, ["g++"], objects)


def _list_defined(source: str) -> set[str]:
    """Names of the functions that a source defines."""
    return set(re.findall(r"^(?:EXPORT |static )?[\w ]+?[ *](\w+)\([^;]*?\) \{", source, re.MULTILINE))


def _list_exported(library: str) -> set[str]:
    """Names of the functions that a library of CUDA exports, without their versions."""
    file = next((CUDA / "lib").glob(f"{library}.[0-9]*"))
    listing = subprocess.run(["nm", "-D", "--defined-only", file], check=True, capture_output=True, text=True).stdout
    symbols = (line.split() for line in listing.splitlines())
    return {name.partition("@")[0] for _, kind, name in symbols if kind in "TWi"}


def _functions(names: set[str], body: str) -> str:
    return "".join(f"int {name}(void) {{ {body} }}\n" for name in sorted(names))


def _write_stub(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def _compiler(file: Path) -> list[str]:
    return ["g++" if file.suffix == ".cpp" else "gcc", "-fPIC", "-O1", "-w"]


def _compile(folder: Path, name: str, compiler: list[str], files: list[Path]) -> None:
    options = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{name}"]
    subprocess.run([*compiler, *options, "-o", folder / name, *files, "-ldl"], check=True)
