"""One line about what a configuration would run."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_grpo.config.schema import Config, ParallelConfig


def outlook(config: Config, start_from: Path | None) -> str:
    """Recipe, algorithm, steps, layouts, and where it would begin.

    Args:
        config: the run's configuration.
        start_from: the checkpoint that the run would begin with; None: it would begin anew.
    """
    loop, generation = config.loop, config.generation.parallel
    algorithm = ("asynchronous " if loop.async_grpo.enabled else "") + config.algorithm.upper()
    samples = f"{loop.num_prompts_per_step} prompts x {loop.num_generations_per_prompt} samples"
    parts = [f"policy on {_ranks(config.policy.parallel)}"] if config.debug.train else ["nothing is trained"]
    if config.value_model is not None and config.debug.train:
        parts.append(f"value model on {_ranks(config.value.parallel)}")
    engines = f"{generation.data} {_plural('engine', generation.data)} of {generation.ranks_per_engine} "
    engines += _plural("rank", generation.ranks_per_engine)
    parts.append(engines if config.generates else f"rollouts of {config.debug.rollouts_from}")
    where = f"{config.cluster.num_nodes} x {config.cluster.gpus} GPUs" if config.cluster.gpus else "CPU"
    return (
        f"{config.name}, {algorithm}, up to {loop.max_num_steps} steps of {samples}; {', '.join(parts)}, on "
        f"{where}; {_beginning(config, start_from)}"
    )


def _ranks(parallel: ParallelConfig) -> str:
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "DP": parallel.data}
    layout = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    if parallel.expert > 1:
        layout += f", EP{parallel.expert}"
    return f"{parallel.world_size} {_plural('rank', parallel.world_size)}{f' ({layout})' if layout else ''}"


def _beginning(config: Config, start_from: Path | None) -> str:
    folder = Path(os.path.abspath(config.run_dir))
    if start_from is None:
        return f"begins in {folder}"
    if folder.resolve() in start_from.resolve().parents:
        return f"goes on after step {start_from.name.removeprefix('step_')} in {folder}"
    return f"begins in {folder} from {start_from}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
