"""The command line of `verify`: the request and its checks."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.config.schema import ParallelConfig

SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "dp": "data",
}
"""Letters of a layout, and the sizes that they stand for."""
DEFAULT_LAYOUTS = "tp2,tp2sp,pp2,cp2,dp2,tp2pp2,tp2cp2,pp2cp2,cp2dp2,pp2vp2"
EXPERT_LAYOUTS = "ep2,tp2ep2,pp2ep2,ep2etp2"
"""Of models with experts besides."""


class UsageError(ValueError):
    """A command line that cannot be carried out; its text names what is wrong, and the fix."""


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """A layout under the name that the user gave it."""

    name: str
    parallel: ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A command line that was checked."""

    model: str = "tiny:qwen3"
    """A folder in Hugging Face format, a hub name, or `tiny:` and a family."""
    layouts: tuple[NamedLayout, ...] | None = None
    """None: the usual ones, as far as the model splits so."""
    packing: tuple[bool, ...] = (True,)
    shrink: bool = False
    """Verify a small copy of the model's own configuration, with random weights."""
    sequences: int = 12
    longest: int = 48
    """Tokens of the longest sequence."""
    steps: int = 3
    """Optimizer steps after which losses are compared."""
    seed: int = 0
    timeout_s: float = 600.0
    """Deadline of one layout."""
    json: bool = False


def read_request(arguments: Sequence[str]) -> Request:
    """The request of a command line.

    Raises:
        UsageError: something in it is wrong.
    """
    values: dict[str, str] = {"packing": "true"}
    options = {"--json"} & set(arguments)
    numbers = {"sequences": int, "longest": int, "steps": int, "seed": int, "timeout_s": float}
    known = ["model", "layouts", "packing", "shrink", *numbers]
    for argument in arguments:
        if argument in options:
            continue
        key, equals, value = argument.partition("=")
        if not equals or key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}=...?" if near else f"known: {', '.join(f'{one}=' for one in known)} --json"
            raise UsageError(f"{argument} is not an argument; {hint}")
        values[key] = value
    given = {key: _number(key, values[key], kind) for key, kind in numbers.items() if key in values}
    return Request(
        model=values.get("model", "tiny:qwen3"),
        layouts=read_layouts(values["layouts"]) if "layouts" in values else None,
        packing=_packing(values["packing"]),
        shrink=_truth("shrink", values.get("shrink", "false")),
        json=bool(options),
        **given,  # type: ignore[arg-type]  # ints, and a float where the field is one
    )


def read_layouts(names: str) -> tuple[NamedLayout, ...]:
    """Layouts from "[a,b]" or "a,b".

    Raises:
        UsageError: one of the names is none.
    """
    return tuple(map(read_layout, _items(names)))


def read_layout(name: str) -> NamedLayout:
    """A layout from a name such as tp2pp2 or tp2cp2sp; sp is sequence parallelism, vp is interleaved pipelines.

    Experts are shared by the ranks that there are; without dp there are as many replicas as they need.

    Raises:
        UsageError: the name is none.
    """
    text = name.lower()
    found = re.fullmatch(r"((?:etp|tp|pp|vp|cp|ep|dp)[1-9][0-9]*)*(sp)?", text)
    parts = re.findall(r"(etp|tp|pp|vp|cp|ep|dp)([1-9][0-9]*)", text)
    if not text or found is None or len({letters for letters, _ in parts}) < len(parts):
        raise UsageError(f"layouts={name} is not a layout; write tp2, pp2, cp2, dp2 and their products, as in tp2pp2")
    sizes: dict[str, Any] = {SIZES[letters]: int(number) for letters, number in parts}
    parallel = ParallelConfig(**sizes, sequence=text.endswith("sp"))
    if "data" not in sizes:  # as many replicas as the experts need ranks
        experts = parallel.expert * parallel.expert_tensor
        parallel = replace(parallel, data=experts // math.gcd(experts, parallel.tensor * parallel.context))
    if parallel.sequence and parallel.tensor == 1:
        raise UsageError(f"layouts={name}: sp needs tp2 or more")
    return NamedLayout(name, parallel)


def _items(text: str) -> list[str]:
    """Parts of "[a,b]" or "a,b"."""
    return [one.strip() for one in text.removeprefix("[").removesuffix("]").split(",") if one.strip()]


def _packing(text: str) -> tuple[bool, ...]:
    return (True, False) if text == "both" else (_truth("packing", text, "true, false or both"),)


def _truth(key: str, text: str, choices: str = "true or false") -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"{key}={text} is not {choices}")
    return text == "true"


def _number(key: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"{key}={text} is not a number") from None
    if value < (0 if key == "seed" else 1):
        raise UsageError(f"{key}={text} is too small")
    return value
