"""Names of the loops' keys: `grpo.KEY`, `ppo.KEY`, ... are one setting, whichever algorithm runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.loop_schema import LOOPS, SampledLoopConfig
from megatron_grpo.config.section import flatten

# Keys, and sections of keys, that loops share: `grpo.NAME` and `ppo.NAME` are one setting.
SHARED = SampledLoopConfig.__dataclass_fields__.keys()


def is_shared(name: str) -> bool:
    """True for a shared key or section, under any algorithm's name."""
    section, _, rest = name.partition(".")
    return section in LOOPS and rest.partition(".")[0] in SHARED


def translate_key(loop: str, name: str) -> str:
    """Rename a shared key or section to that of a loop's section."""
    return f"{loop}.{name.partition('.')[2]}" if is_shared(name) else name


def find_counterpart(loop: str, name: str) -> str | None:
    """Find the key with which a loop says the same as another's key."""
    passes = {f"{sampled}.{LOOPS[sampled].passes_name}": sampled for sampled in ("grpo", "ppo")}
    return f"{loop}.{LOOPS[loop].passes_name}" if name in passes and loop in passes.values() else None


def select_keys(section: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    """Select the shared keys of a loop's section, or the others."""
    return {key: value for key, value in section.items() if (key in SHARED) == shared}


def unite_shared_keys(
    composed: DictConfig, run_loop: str, list_sources: Callable[[], Iterable[Collection[str]]]
) -> tuple[dict[str, str], list[Problem]]:
    """Write one value of each shared key into all loop sections.

    Other values may refer to it there. It is the one that was set, under any name, else the run's default.
    `list_sources` lists the keys that the command line and each file of conf/ set, the last read first; it takes a
    tenth of a second.

    Returns:
        By key, the name under which it was set, if that is another algorithm's; and the contradictions.
    """
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    if not all(isinstance(tree[loop], dict) for loop in LOOPS):
        return {}, []  # a recipe with a value in place of a section is refused when types are checked
    loops = sorted(LOOPS, key=lambda loop: loop != run_loop)  # the run's own section is the first
    settings = {loop: dict(flatten(select_keys(tree[loop], shared=True))) for loop in loops}
    united = dataclasses.asdict(SampledLoopConfig()) | select_keys(dataclasses.asdict(LOOPS[run_loop]()), shared=True)
    written_names, problems = {}, []
    for name in dict.fromkeys(name for loop in loops for name in settings[loop]):
        values = {loop: settings[loop][name] for loop in loops if name in settings[loop]}
        # A key may be set under several names, in different files or on the command line. Then the source that Hydra
        # reads last decides, as for any other key; two values in one source are a contradiction.
        if any(value != next(iter(values.values())) for value in values.values()):
            by_source = ([loop for loop in values if f"{loop}.{name}" in source] for source in list_sources())
            values = {loop: values[loop] for loop in next(filter(None, by_source), values)}
        first, value = next(iter(values.items()))
        if rival := next((loop for loop in values if values[loop] != value), None):
            text = f"is the same setting as {rival}.{name}={to_text(values[rival])}; leave one of them out"
            problems.append(Problem(f"{first}.{name}={to_text(value)}", text))
        set_key(united, name, value)
        if first != run_loop:
            written_names[f"{run_loop}.{name}"] = f"{first}.{name}"
    for loop in LOOPS:
        OmegaConf.update(composed, loop, select_keys(tree[loop], shared=False) | united, merge=False)
    return written_names, problems


def set_key(section: dict[str, Any], name: str, value: object) -> None:
    """Set a value in nested sections by its dotted name."""
    *path, key = name.split(".")
    for part in path:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section[key] = value
