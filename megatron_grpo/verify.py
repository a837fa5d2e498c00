"""Proves layouts equal on this machine: python -m megatron_grpo.verify model=tiny:qwen3 'layouts=[tp2,pp2]'"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import FAILED, as_command, parse_arguments, silence_packages
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.config.section import FamilyPath, NonNegative, Positive, Seconds
from megatron_grpo.models.families import FAMILIES, adopt_families, explain_other_family
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.layout_checks import check_split
from megatron_grpo.preflight.model_file_checks import find_weight_problems

if TYPE_CHECKING:
    from megatron_grpo.verification.ranks import Row
    from megatron_grpo.verification.tolerances import Distance

# Parallel sizes by their abbreviations in the name of a layout; etp before its ending tp.
SIZES = {
    "etp": "expert_tensor",
    "tp": "tensor",
    "pp": "pipeline",
    "vp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "dp": "data",
}
DEFAULT_LAYOUTS = "tp2,tp2sp,pp2,cp2,dp2,tp2pp2,tp2cp2,pp2cp2,cp2dp2,pp2vp2"
FORMULA_LAYOUTS = "tp2,cp2,pp2,dp2"  # default layouts with loss=NAME
EXPERT_LAYOUTS = "ep2,tp2ep2,pp2ep2,ep2etp2"  # further default layouts for models with experts

USAGE = f"""\
python -m megatron_grpo.verify [key=value ...] [--json]

Runs the same tokens through each layout in float32 on this machine, and compares with transformers in float64. A layout
may be a small multiple as far away as transformers in float32. Exit code 1 when something is further.

With loss=NAME the tokens have the loss of an objective, a correction or advantages: one of loss_fn.objective, of
loss_fn.corrections or of grpo.adv_estimator.name, or a function of your own (docs/extending.md).
Its loss and gradient are compared with those of one process on rectangles, packed and padded, in one microbatch and in
many, and in [{FORMULA_LAYOUTS}]. The ranks of a layout start once for all formulas.

  model      a folder in Hugging Face format, a hub name, or tiny: and one of
{textwrap.fill(", ".join(FAMILIES), 106, initial_indent=" " * 13, subsequent_indent=" " * 13)}
             (tiny:qwen3)
  family     module:NAME, a family of your own that reads the model (docs/extending.md)
  shrink     true: a small random model of the model's own configuration (false)
  tower      true: the vision tower of a model that sees images is trained too (false)
  layouts    of tp (tensor), pp (pipeline), vp (virtual pipeline), cp (context), dp (data), ep (expert),
             etp (expert-tensor parallelism), sp (sequence), such as [tp2,tp2sp,pp2vp2,cp2dp2]; by default those of
             {DEFAULT_LAYOUTS},
             and with experts {EXPERT_LAYOUTS}, that the model splits into
  packing    true, false or both (true)
  sequences  how many (12)
  longest    tokens of the longest (48)
  steps      optimizer steps after which losses are compared (3)
  seed       of tokens, and of the weights of a model that is made (0)
  timeout_s  deadline of one layout (600)
  loss       formulas to verify: a name, module.function of your own, several as in [gspo,maxrl], or all, the built-in
             ones
  options    parameters of a function of your own, such as [high=0.3,low=0.1]
  --json     results as JSON
"""

# (name that the user gave it, layout)
Layouts = list[tuple[str, ParallelConfig]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """The checked command line of a verification; USAGE explains the options."""

    model: str = "tiny:qwen3"
    family: FamilyPath | None = None
    """Family of the user's code that reads the model; None: one of the package."""
    layouts: Layouts | None = None
    """Layouts to verify; None: the default layouts that fit the model."""
    packing: tuple[bool, ...] = (True,)
    shrink: bool = False
    tower: bool = False
    """Whether the vision tower is trained."""
    sequences: Positive = 12
    longest: Positive = 48
    steps: Positive = 3
    seed: NonNegative = 0
    timeout_s: Seconds = 600.0
    losses: tuple[str, ...] = ()
    """Formulas of the loss to verify; empty: the model."""
    options: dict[str, str] = field(default_factory=dict)
    """Parameters of the formula."""
    json: bool = False


@as_command("verify", USAGE, failures=(RunError,))
def main(arguments: Sequence[str]) -> int:
    """Verify layouts, and print the results; return the exit code."""
    request = read_request(arguments)
    families = {} if request.family is None else {"family": request.family}
    if problems := adopt_families(families, list_import_folders()):
        raise ConfigError(problems)
    with silence_packages(), announce_waits(), tempfile.TemporaryDirectory() as folder:
        if not request.json:
            print(_describe_request(request), flush=True)
        rows = list(verify(request, Path(folder)))
    failed = [row for row in rows if not row.passed]
    if request.json:
        results = [asdict(row) | {"passed": row.passed, "faults": row.faults} for row in rows]
        print(json.dumps({"model": request.model, "losses": request.losses, "rows": results}))
    elif failed:
        print(f"FAILED: {len(failed)} of {len(rows)} are further away than rounding explains")
    else:
        print(f"passed: all {len(rows)} are equal but for rounding")
    return FAILED if failed else 0


def verify(request: VerifyRequest, folder: Path) -> Iterator[Row]:
    """Yield the results of one rank, then of every layout.

    A model with random weights is written to `folder`.

    Raises:
        ValueError: there is no such model, or a layout does not fit it.
        RunError: a rank failed.
    """
    # Imported here, because torch takes seconds to import.
    from megatron_grpo.verification.formula_layouts import list_formulas, make_formula_problem, make_subjects
    from megatron_grpo.verification.problem import make_batch, prepare_model
    from megatron_grpo.verification.ranks import Task, compare_layout, run_layout

    problems = [make_formula_problem(name, request.options) for name in list_formulas(request.losses)]
    model = prepare_model(request.model, request.shrink, folder / "model", request.seed)
    shape = read_model_shape(model)
    shape = include_tower(shape, model) if request.tower else shape
    _require_readable(request, model, shape)
    # Before the tokens are computed, so that a layout that does not fit is refused at once.
    layouts = _select_layouts(request, shape)
    batch = make_batch(shape.vocab, request.sequences, request.longest, request.seed)
    store = folder / "images" if shape.vision is not None else None
    if store is not None and shape.vision is not None:
        from megatron_grpo.verification.random_pictures import add_pictures

        batch = add_pictures(batch, shape.vision, model, store, request.seed)
    with phase("transformers' outputs and gradients"):
        subjects = make_subjects(model, shape, batch, problems, request.seed, store)
    one_rank: dict[str, Row] = {}
    images_folder = "" if store is None else str(store)
    for name, parallel, most_tokens in _list_cases(request, layouts, sum(batch.lengths)):
        for packed in request.packing:
            layout, limits = (str(model), parallel, packed), (request.steps, request.seed, request.timeout_s)
            tasks = [
                Task(*layout, part.batch, *limits, part.loss, most_tokens, part.formula, images_folder, request.tower)
                for part in subjects
            ]
            try:
                with phase(f"layout {name}"):
                    results = run_layout(tasks)
            except RunError as error:
                raise RunError(f"layout {name}: {error}") from None
            for subject, result in zip(subjects, results, strict=True):
                formula, first = subject.formula, one_rank.get(subject.formula)
                row = compare_layout(name, packed, result, subject.reference, subject.batch, first)
                row = replace(row, formula=formula)
                if not request.json:
                    _print_row(row, None if one_rank else subject.reference.reference)
                one_rank.setdefault(formula, row)
                yield row


def _require_readable(request: VerifyRequest, model: Path, shape: ModelShape) -> None:
    """Refuse weights without support, and a family that reads other models."""
    text = None if request.family is None else explain_other_family(shape, request.family)
    if text is not None:
        raise ValueError(f"family={request.family} {text}")
    for text in find_weight_problems(model, shape):
        raise ValueError(f"model={request.model}: {text}")


def _list_cases(request: VerifyRequest, layouts: Layouts, tokens: int) -> list[tuple[str, ParallelConfig, int | None]]:
    """List layouts by name, with the tokens of their largest microbatch.

    None: that of the tasks. `tokens`: of the whole batch.
    """
    # The gradients of all layouts are compared with those of one rank, which therefore comes first.
    one_rank = ParallelConfig()
    cases: list[tuple[str, ParallelConfig, int | None]] = [("tp1", one_rank, None)]
    if request.losses:
        cases += [("1 batch", one_rank, 2 * tokens), ("many", one_rank, request.longest)]
    return cases + [(*layout, None) for layout in layouts if layout[1] != one_rank]


def add_sequence_parallelism(parallel: ParallelConfig, shape: ModelShape) -> ParallelConfig:
    """Add it to a layout if the model needs it."""
    needs_sequence = parallel.tensor > 1 and (shape.experts is not None or shape.latent is not None)
    return replace(parallel, sequence=parallel.sequence or needs_sequence)


def _select_layouts(request: VerifyRequest, shape: ModelShape) -> Layouts:
    """Select the requested layouts, or the defaults that fit the model."""
    names = DEFAULT_LAYOUTS if shape.experts is None else f"{DEFAULT_LAYOUTS},{EXPERT_LAYOUTS}"
    names = FORMULA_LAYOUTS if request.losses else names
    usable = []
    for name, requested in read_layouts("layouts", names) if request.layouts is None else request.layouts:
        parallel = add_sequence_parallelism(requested, shape)
        broken = [f"{key} {text}" for is_broken, key, text in check_split("parallel", parallel, shape) if is_broken]
        if not broken:
            usable.append((name, parallel))
        elif request.layouts is not None:
            raise ValueError(f"layouts={name}: {broken[0].removeprefix('parallel.')}")
        if request.layouts is not None and request.sequences < parallel.data:
            text = f"sequences={request.sequences} do not give each of {parallel.data} data-parallel replicas one"
            raise ValueError(text)
    return usable


def _describe_request(request: VerifyRequest) -> str:
    model = f"model={request.model}" + (f" family={request.family}" if request.family else "")
    if not request.losses:
        return f"verifies {model}"
    options = ",".join(f"{name}={text}" for name, text in request.options.items())
    losses = request.losses[0] if len(request.losses) == 1 else f"[{','.join(request.losses)}]"
    return f"verifies loss={losses}{f' options=[{options}]' if options else ''} with {model}"


def _describe_reference(reference: Distance) -> str:
    gradient = max(reference.gradients.values())
    return (
        f"distances from transformers in float64; its own in float32: {reference.logprob:.1e} (root mean square "
        f"{reference.logprob_rms:.1e}), gradient {gradient:.1e}"
    )


_HEADER = "layout       packed  |d logprob|  gradient err  d loss    import=export  peak GiB  step s          worst"


def _print_row(row: Row, reference: Distance | None) -> None:
    """Print a row; with a reference the header and its distance come first."""
    if reference is not None:
        print(_describe_reference(reference), _HEADER, sep="\n")
    print(_format_row(row), *(f"    {text}" for text in row.faults), sep="\n", flush=True)


def _format_row(row: Row) -> str:
    return (
        f"{row.layout:12} {'yes' if row.packed else 'no':6}  {row.logprob:11.1e}  {row.gradient:12.1e}  "
        f"{row.loss:8.1e}  {'exact' if row.exact else 'DIFFERS':13}  {row.peak_gib:8.2f}  {row.step_s:6.3f}  "
        f"{'ok' if row.passed else 'FAILED':6}  {row.worst_tensor}{f' of {row.formula}' if row.formula else ''}"
    )


def read_request(arguments: Sequence[str]) -> VerifyRequest:
    """Read the request of a command line.

    Raises:
        ValueError: an argument is wrong.
    """
    kinds = get_type_hints(VerifyRequest, include_extras=True)
    kinds |= {"layouts": str, "packing": Literal["true", "false", "both"], "options": list[str], "loss": list[str]}
    values = parse_arguments(arguments, {**kinds, "--json": kinds.pop("json")}).options
    if "layouts" in values:
        values["layouts"] = read_layouts("layouts", values["layouts"])
    if "packing" in values:
        values["packing"] = {"true": (True,), "false": (False,), "both": (True, False)}[values["packing"]]
    elif "loss" in values:
        values["packing"] = (True, False)
    values["losses"] = tuple(values.pop("loss", ()))
    if "options" in values:
        pairs = [option.partition("=") for option in values["options"]]
        if len(values["losses"]) != 1 or not all(equals for _, equals, _ in pairs):
            text = "options are parameters of one loss=NAME, written [high=0.3,low=0.1]"
            raise ValueError(f"options={','.join(values['options'])}: {text}")
        values["options"] = {name: text for name, _, text in pairs}
    return VerifyRequest(**values)


def read_layouts(key: str, names: str) -> Layouts:
    """Read layouts from a text such as "[tp2,pp2]"; `key` names the argument.

    Raises:
        ValueError: a name is not a layout.
    """
    parts = (name.strip() for name in names.removeprefix("[").removesuffix("]").split(","))
    return [(name, _read_layout(f"{key}={name}", name.lower())) for name in parts if name]


def _read_layout(subject: str, text: str) -> ParallelConfig:
    """Read a layout from a name such as tp2pp2 or tp2cp2sp.

    Without dp, the number of replicas is the smallest with which expert * expert_tensor divides the ranks.
    """
    part = f"({'|'.join(SIZES)})([1-9][0-9]*)"
    parts = re.findall(part, text)
    if not re.fullmatch(f"({part})*(sp)?", text) or len({letters for letters, _ in parts}) < len(parts):
        raise ValueError(f"{subject} is not a layout; write tp2, pp2, cp2, dp2 and their products, as in tp2pp2")
    sizes: dict[str, Any] = {SIZES[letters]: int(number) for letters, number in parts}
    parallel = ParallelConfig(**sizes, sequence=text.endswith("sp"))
    if "data" not in sizes:
        experts = parallel.expert * parallel.expert_tensor
        parallel = replace(parallel, data=experts // math.gcd(experts, parallel.tensor * parallel.context))
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError(f"{subject}: sp needs tp2 or more")
    return parallel


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
