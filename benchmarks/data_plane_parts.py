"""What both sides of data_plane.py run on: sizes, made-up prompts and responses, and how a step is measured.

Runs beside the code of either side, so it imports nothing of it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from driver_meter import Meter
from numpy.typing import NDArray

PROMPT_TOKENS = 128
ITERATIONS = 2
"""Passes of the optimizer over a step's samples: with two, log-probabilities at the start of the step are computed."""
TOKEN_BYTES = 8
"""A sampled token: its id (int32) and its log-probability (float32)."""
TASK = "math"
OBJECT_STORE_BYTES = 6 * 2**30
VOCABULARY = 151_936
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
}
"""config.json of a model that nobody loads."""
WORDS = np.array([f"{number:04d}" for number in range(10_000)], dtype="S4")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one side is measured at."""

    samples: int
    """Samples of a step."""
    tokens: int
    """Tokens of a response on average: lengths spread evenly from half of it to one and a half times it."""
    replicas: int
    """Data-parallel ranks, and engines."""
    group: int
    """Samples of a prompt."""
    minibatches: int
    """Optimizer steps of one pass over the samples."""
    steps: int
    """Steps that are measured, after one to warm up."""

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.samples // self.group

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return self.tokens + self.tokens // 2

    def overrides(self, folder: Path) -> list[str]:
        """A run of these sizes, as overrides of a command line that both sides understand.

        Args:
            folder: place of everything that the run writes.
        """
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        sequence = PROMPT_TOKENS + self.longest
        return [
            f"run_dir={folder / 'run'}",
            f"policy.model.path={model}",
            f"policy.parallel.data={self.replicas}",
            f"policy.max_total_sequence_length={sequence}",
            f"policy.microbatch_tokens={4 * sequence}",
            f"policy.train_global_batch_samples={self.samples // self.minibatches}",
            f"generation.parallel.data={self.replicas}",
            f"generation.max_new_tokens={self.longest}",
            f"data.max_input_seq_length={PROMPT_TOKENS}",
            "data.train_path=made_up.jsonl",
            "data.apply_chat_template=false",
            f"env.{TASK}.type=reward_functions",
            f"env.{TASK}.reward_funcs=[{__name__}.first_character]",
            f"grpo.num_prompts_per_step={self.prompts}",
            f"grpo.num_generations_per_prompt={self.group}",
            f"grpo.num_iterations={ITERATIONS}",
            f"grpo.max_num_steps={1 + self.steps}",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "loss_fn.reference_policy_kl_penalty=0",
            "checkpointing.enabled=false",
            "logger.progress=false",
        ]


class MadeUpPrompts:
    """A dataset of prompts for as many steps as are measured."""

    def __init__(self, sizes: Sizes) -> None:
        self._rows = sizes.prompts * (1 + sizes.steps)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, idx: int) -> dict[str, Any]:
        token_ids = np.random.default_rng(idx).integers(VOCABULARY, size=PROMPT_TOKENS)
        text = _text(token_ids)
        return {
            "message_log": [{"role": "user", "content": text, "token_ids": token_ids.tolist()}],
            "length": PROMPT_TOKENS,
            "extra_env_info": {"prompt": text, "<reference>": "0"},
            "loss_multiplier": 1.0,
            "idx": idx,
            "task_name": TASK,
            "prompt": text,
        }


@dataclass(frozen=True, slots=True)
class Response:
    """A made-up response."""

    token_ids: NDArray[np.int32]
    """[tokens], int32: made-up vocabulary entries."""
    logprobs: NDArray[np.float32]
    """[tokens], float32: made-up log-probabilities, at most 0."""
    text: str
    """Text of the response, four characters a token."""
    stop_reason: str


def made_up(seed: int, longest: int) -> Response:
    """A response that follows from its seed.

    Args:
        seed: seed of the request.
        longest: most tokens of the response, which has a third of them at least.
    """
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(longest // 3, longest, endpoint=True))
    token_ids = rng.integers(VOCABULARY, size=tokens, dtype=np.int32)
    logprobs = -rng.random(tokens, dtype=np.float32)
    return Response(token_ids, logprobs, _text(token_ids), "length" if tokens == longest else "stop")


def _text(token_ids: NDArray[Any]) -> str:
    """Text of [tokens], integers: four digits a token, made without a Python object for each."""
    return WORDS[token_ids % len(WORDS)].tobytes().decode("ascii")


def first_character(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward function: 1 for responses that begin with an even digit."""
    return [float(int(text[0]) % 2 == 0) for text in completions]


def start_ray() -> None:
    """Start Ray with room for the tokens of some steps."""
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )


def measure_parts(
    sizes: Sizes, train: Callable[[Callable[[], None]], Sequence[tuple[Mapping[str, float], float]]]
) -> Any:
    """The figures of some steps.

    Args:
        sizes: samples, tokens and replicas that are measured at.
        train: makes 1 + sizes.steps steps and calls its argument at the begin of each; gives the seconds by phase and
            the mean tokens of a response of each.
    """
    meter = Meter()
    gc.collect()
    gc.freeze()  # as a run does when it is up
    with meter.watching():
        reports = train(meter.mark)
        meter.mark()
    assert len(reports) == 1 + sizes.steps == len(meter.marks) - 1
    wall, cpu, moved = (np.diff(column)[1:].tolist() for column in zip(*meter.marks, strict=True))
    tokens = [mean * sizes.samples for _, mean in reports[1:]]
    phases = {name: [timing[name] for timing, _ in reports[1:]] for name in reports[-1][0]}
    return {
        "samples": sizes.samples,
        "tokens_per_sample": sizes.tokens,
        "steps": sizes.steps,
        "driver_cpu_s": round(statistics.median(cpu), 3),
        "driver_bytes_fraction": round(
            statistics.median(duration / (TOKEN_BYTES * count) for duration, count in zip(moved, tokens, strict=True)),
            6,
        ),
        "driver_memory_gib": round((meter.peak_bytes - meter.begin_bytes) / 2**30, 3),
        "driver_bytes": int(statistics.median(moved)),
        "token_bytes": int(TOKEN_BYTES * statistics.median(tokens)),
        "wall_s": round(statistics.median(wall), 3),
        "phases_s": {name: round(statistics.median(seconds), 3) for name, seconds in phases.items()},
        "driver_cpu_s_by_step": [round(duration, 3) for duration in cpu],
        "load_average": os.getloadavg()[0],
    }


def run_side(arguments: Sequence[str], measure: Callable[[Sizes, Path], Any]) -> None:
    """What a side's script does: figures at the sizes of its first argument (JSON), into the file of its second.

    Args:
        arguments: sizes, the file, and a folder for what a run writes.
        measure: brings a run up and measures it.
    """
    sizes, file, folder = arguments
    Path(file).write_text(json.dumps(measure(Sizes(**json.loads(sizes)), Path(folder))))
