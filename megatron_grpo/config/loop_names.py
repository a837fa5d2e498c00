"""Names of the loops' keys: `grpo.KEY`, `ppo.KEY`, ... are one setting, whichever algorithm runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.loop_schema import (
    DPOConfig,
    GRPOConfig,
    LoopConfig,
    PPOConfig,
    RewardTrainingConfig,
    SampledLoopConfig,
    SFTConfig,
)
from megatron_grpo.config.section import flatten

# The loops of algorithms; each has a section of its name, and distillation that of GRPO.
LOOPS: dict[str, type[LoopConfig]] = {
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward_model": RewardTrainingConfig,
}
# Keys, and sections of keys, that loops share: `grpo.NAME` and `ppo.NAME` are one setting.
SHARED = SampledLoopConfig.__dataclass_fields__.keys()
# Sections that only these algorithms read, except the shared keys in them.
READERS = {
    "grpo": ("grpo", "distillation"),
    **dict.fromkeys(("ppo", "value", "value_loss_fn"), ("ppo",)),
    **{loop: (loop,) for loop in ("sft", "dpo", "reward_model")},
}


def find_loop(algorithm: str) -> str:
    """Find the section of an algorithm's loop."""
    return algorithm if algorithm in LOOPS else "grpo"


def is_shared(name: str) -> bool:
    """True for a shared key or section, under any algorithm's name."""
    section, _, rest = name.partition(".")
    return section in LOOPS and rest.partition(".")[0] in SHARED


def list_loops(name: str) -> list[str]:
    """List the loops that have a shared key or section."""
    key = name.split(".")[1]
    return [loop for loop, section in LOOPS.items() if key in section.__dataclass_fields__]


def translate_key(algorithm: str, name: str) -> str:
    """Rename a shared key or section to an algorithm's name."""
    return f"{find_loop(algorithm)}.{name.partition('.')[2]}" if is_shared(name) else name


def find_reader(name: str) -> str | None:
    """Find an algorithm that reads a key; None: all read it."""
    section, _, rest = name.partition(".")
    if is_shared(name):
        return None if rest.partition(".")[0] in LoopConfig.__dataclass_fields__ else "grpo"
    return next(iter(READERS.get(section, ())), None)


def is_foreign_to(algorithm: str, name: str) -> bool:
    """True if only other algorithms read a key."""
    if is_shared(name):
        return find_loop(algorithm) not in list_loops(name)
    return find_reader(name) is not None and algorithm not in READERS[name.partition(".")[0]]


def find_counterpart(algorithm: str, name: str) -> str | None:
    """Find the key with which the algorithm says the same as another's key."""
    passes = {f"{loop}.{LOOPS[loop].passes_name}": loop for loop in ("grpo", "ppo")}
    own = find_loop(algorithm)
    return f"{own}.{LOOPS[own].passes_name}" if name in passes and own in passes.values() else None


def explain_foreign_key(key: str, algorithm: str) -> str:
    """Explain that only other algorithms read a key."""
    if is_shared(key):
        return f"is about samples that a step learns from, and algorithm={algorithm} learns from rows; leave it out"
    advice = "; the value model is PPO's baseline" if algorithm == "ppo" else ""
    if counterpart := find_counterpart(algorithm, key):
        advice = f"; give {counterpart}"
    return f"is for algorithm={find_reader(key)}, and this run has algorithm={algorithm}{advice}"


def list_own_defaults() -> dict[str, dict[str, Any]]:
    """List the defaults of the keys that single loops have, by loop."""
    return {loop: _select_keys(dataclasses.asdict(section()), shared=False) for loop, section in LOOPS.items()}


def unite_shared_keys(
    composed: DictConfig, algorithm: str, list_sources: Callable[[], Iterable[Collection[str]]]
) -> tuple[dict[str, str], list[Problem]]:
    """Write one value of each shared key into all loop sections, to which other values may refer.

    The value is the one that was set, under any name, else the algorithm's default. `list_sources` lists the keys that
    the command line and each file of conf/ set, the last read first; it takes a tenth of a second.

    Returns:
        By key, the name under which it was set, if that is another algorithm's; and the contradictions.
    """
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    if not all(isinstance(tree[loop], dict) for loop in LOOPS):
        return {}, []  # a recipe with a value in place of a section is refused when types are checked
    own = find_loop(algorithm)
    loops = sorted(LOOPS, key=lambda loop: loop != own)  # the algorithm's own section is the first
    shared = {loop: _select_keys(tree[loop], shared=True) for loop in loops}
    set_values = {loop: dict(flatten(shared[loop])) for loop in loops}
    defaults = dataclasses.asdict(SampledLoopConfig()) | _select_keys(dataclasses.asdict(LOOPS[own]()), shared=True)
    united = OmegaConf.merge(defaults, *(shared[loop] for loop in reversed(loops)))
    setters: dict[str, list[str]] = {}
    for loop in loops:
        for name in set_values[loop]:
            setters.setdefault(name, []).append(loop)
    # A key may be set under several names, in different files or on the command line. Then the source that Hydra reads
    # last decides, as for any other key; two values in one source are a contradiction.
    conflicts = [
        name
        for name, names in setters.items()
        if any(set_values[loop][name] != set_values[names[0]][name] for loop in names)
    ]
    sources = list_sources() if conflicts else []
    problems = []
    for name in conflicts:
        loops_by_source = ([loop for loop in setters[name] if f"{loop}.{name}" in source] for source in sources)
        first, *further = next(filter(None, loops_by_source), setters[name])
        other = next((loop for loop in further if set_values[loop][name] != set_values[first][name]), None)
        if other is not None:
            setting, contradiction = (f"{loop}.{name}={to_text(set_values[loop][name])}" for loop in (first, other))
            problems.append(Problem(setting, f"is the same setting as {contradiction}; leave one of them out"))
        else:
            OmegaConf.update(united, name, set_values[first][name])
            setters[name] = [first]
    values = cast("dict[str, Any]", OmegaConf.to_container(united, resolve=False))
    for loop in LOOPS:
        OmegaConf.update(composed, loop, _select_keys(tree[loop], shared=False) | values, merge=False)
    return {f"{own}.{name}": f"{loop}.{name}" for name, (loop, *_) in setters.items() if loop != own}, problems


def _select_keys(section: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    return {key: value for key, value in section.items() if (key in SHARED) == shared}


def leave_out_defaults(values: dict[str, Any], algorithm: str) -> None:
    """Remove default values of keys that the algorithm's loop does not have.

    Changed ones stay, so that they are refused. Shared keys under other names are removed if they repeat the value.
    """
    own = find_loop(algorithm)
    own_section = dict(values[own]) if isinstance(values.get(own), dict) else {}
    for loop, section_type in LOOPS.items():
        section, is_own = values.get(loop), loop == own
        if not isinstance(section, dict):
            continue
        defaults = dataclasses.asdict(SampledLoopConfig()) | dataclasses.asdict(section_type())
        own_names = section_type.__dataclass_fields__ if is_own else ()
        for name in [name for name in section if name in defaults and name not in own_names]:
            value, default = section[name], defaults[name]
            if isinstance(value, dict) and isinstance(default, dict):
                section[name] = {key: leaf for key, leaf in value.items() if key not in default or leaf != default[key]}
            repeats = not is_own and name in own_section and value == own_section[name]
            if repeats or value == default or section[name] == {}:
                del section[name]
        if not section and not is_own:
            del values[loop]
