"""Proves layouts equal on this machine: python -m megatron_grpo.verify model=tiny:qwen3 layouts=[tp2,pp2,cp2dp2]"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.help import answered
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.preflight.layout import training_split_problems
from megatron_grpo.proof.request import (
    DEFAULT_LAYOUTS,
    EXPERT_LAYOUTS,
    NamedLayout,
    Request,
    UsageError,
    read_layouts,
    read_request,
)
from megatron_grpo.weights.families import shape_of_folder
from megatron_grpo.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.proof.ranks import Row

USAGE = f"""\
python -m megatron_grpo.verify [key=value ...] [--json]

Runs the same tokens through each layout in float32 on this machine, and compares with transformers. Exit code 1 when
something is past its tolerance.

  model      a folder in Hugging Face format, a hub name, or tiny: and one of
             qwen3, qwen2, llama, gemma3, qwen3_moe, mixtral, deepseek_v3 (tiny:qwen3)
  shrink     true: a small random model of the model's own configuration (false)
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
  --json     results as JSON
"""
FAILED, MISTAKE = 1, 2


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    if answered(arguments, USAGE):
        return 0
    try:
        request = read_request(arguments)
        with tempfile.TemporaryDirectory() as folder:
            rows = list(verify(request, Path(folder)))
    except (UsageError, ValueError, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return MISTAKE
    except RunError as error:
        print(f"verify: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if request.json:
        print(json.dumps({"model": request.model, "rows": [asdict(row) | {"passed": row.passed} for row in rows]}))
    return 0 if all(row.passed for row in rows) else FAILED


def verify(request: Request, folder: Path) -> Iterator[Row]:
    """The result of every layout, that of one rank first; without --json each is printed as it comes.

    Args:
        request: what to verify.
        folder: where a model may be made.

    Raises:
        UsageError: there is no such model, or it does not split so.
        RunError: a rank failed.
    """
    warnings.filterwarnings("ignore")  # of packages, about what they fall back to
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    from megatron_grpo.proof.models import prepare_model
    from megatron_grpo.proof.problem import make_batch, solve
    from megatron_grpo.proof.ranks import (
        Task,
        compare,  # here: torch takes seconds to import
        run_layout,
    )

    model = prepare_model(request.model, request.shrink, folder / "model", request.seed)
    shape = shape_of_folder(model)
    layouts = _layouts(request, shape)
    batch = make_batch(shape.vocab, request.sequences, request.longest, request.seed)
    truth = solve(model, batch)
    one_rank: Row | None = None
    for layout in (NamedLayout("tp1", ParallelConfig()), *layouts):
        for packed in request.packing:
            task = Task(
                folder=str(model),
                parallel=layout.parallel,
                packing=packed,
                sequences=request.sequences,
                longest=request.longest,
                steps=request.steps,
                seed=request.seed,
                timeout_s=request.timeout_s,
            )
            try:
                found = run_layout(task)
            except RunError as error:
                raise RunError(f"layout {layout.name}: {error}") from None
            row = compare(layout.name, packed, found, truth, batch, one_rank)
            one_rank = one_rank or row
            if not request.json:
                _print(row, first=row is one_rank)
            yield row


def _layouts(request: Request, shape: ModelShape) -> list[NamedLayout]:
    """The layouts that are asked for, or the usual ones that the model splits into.

    Raises:
        UsageError: one that is asked for does not fit the model.
    """
    if request.layouts is not None:
        asked = [_as_trained(layout, shape) for layout in request.layouts]
        for layout in asked:
            _require_split(layout, shape, request.sequences)
        return asked
    names = DEFAULT_LAYOUTS if shape.experts is None else f"{DEFAULT_LAYOUTS},{EXPERT_LAYOUTS}"
    usual = (_as_trained(layout, shape) for layout in read_layouts(names))
    return [layout for layout in usual if not any(training_split_problems("parallel", layout.parallel, shape))]


def _as_trained(layout: NamedLayout, shape: ModelShape) -> NamedLayout:
    """The layout with sequence parallelism where tensor parallelism cannot train the model without."""
    needed = layout.parallel.tensor > 1 and (shape.experts is not None or shape.latent is not None)
    return replace(layout, parallel=replace(layout.parallel, sequence=layout.parallel.sequence or needed))


def _require_split(layout: NamedLayout, shape: ModelShape, sequences: int) -> None:
    """Whether the model splits so.

    Raises:
        UsageError: it does not; says what does.
    """
    parallel = layout.parallel
    for problem in training_split_problems("parallel", parallel, shape):
        raise UsageError(f"layouts={layout.name}: {problem.subject.removeprefix('parallel.')} {problem.text}")
    if sequences < parallel.data:
        raise UsageError(f"sequences={sequences} do not give each of {parallel.data} data-parallel replicas one")


def _print(row: Row, *, first: bool) -> None:
    if first:
        print("layout       packed  |d logprob|  gradient err  d loss    import=export  peak GiB  step s")
    print(
        f"{row.layout:12} {'yes' if row.packed else 'no':6}  {row.logprob:11.1e}  {row.gradient:12.1e}  "
        f"{row.loss:8.1e}  {'exact' if row.exact else 'DIFFERS':13}  {row.peak_gib:8.2f}  {row.step_s:6.3f}  "
        f"{'ok' if row.passed else 'FAILED'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
