"""What a run leaves of one step as evidence: recorded rollouts, and the weights of each available version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.batch.rollout_files import find_recorded_steps, read_rows
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.run.directory import POLICY_FOLDER
from megatron_grpo.trainer.hf_export import export_checkpoint
from megatron_grpo.verification.doctor.law import Tokens, compute_residual


@dataclass(frozen=True, slots=True)
class Rollout:
    """A recorded rollout, with the sampled tokens of one weight version."""

    row: dict[str, Any]
    """The row of the file (`read_rollouts`)."""
    tokens: Tokens
    indices: Tensor
    """[chosen tokens], int64: index of each chosen token among all sampled tokens of the rollout."""

    @property
    def name(self) -> str:
        return f"prompt {self.row['prompt_idx']}, sample {self.row['sample']}"

    def keep_up_to(self, position: int) -> Rollout:
        """Keep the chosen tokens up to a position, which is included."""
        return self.drop_tokens(self.tokens.chosen > position)

    def drop_tokens(self, left_out: Tensor) -> Rollout:
        """Drop chosen tokens where `left_out`, [chosen tokens], bool, is true."""
        remaining, tokens = ~left_out, self.tokens
        return Rollout(
            self.row, Tokens(tokens.ids, tokens.chosen[remaining], tokens.begins[remaining]), self.indices[remaining]
        )

    def replace_prompt(self, prompt: Sequence[int]) -> Tokens:
        """Build the sequence with other token ids before its first response."""
        tokens, first = self.tokens, int(self.row["spans"][0][0])
        shift = len(prompt) - first
        ids = torch.cat([torch.tensor(prompt, dtype=torch.int64), tokens.ids[first:]])
        return Tokens(ids, tokens.chosen + shift, tokens.begins + shift)

    def read_column(self, name: str) -> Tensor:
        """Read a column at the chosen tokens: [chosen tokens], float32."""
        return torch.from_numpy(np.array(self.row[name], dtype=np.float32))[self.indices]


def join_spans(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Find begin and end of each response, which a refit splits."""
    joined: list[tuple[int, int]] = []
    before = None
    for start, end, version in row["spans"]:
        if joined and joined[-1][1] == start and version != before:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
        before = version
    return joined


def read_rollout(row: dict[str, Any], version: int, *, recomputed: bool) -> Rollout | None:
    """Read the sampled tokens of a row that depend on `version` alone.

    Args:
        row: row of the file of rollouts.
        version: a weight version.
        recomputed: whether the engines computed their cache anew after a refit.

    Returns:
        The rollout; None: it has no such tokens.
    """
    spans = [Span(*span) for span in row["spans"]]
    positions_of_spans = [np.arange(span.start, span.end) for span in spans]
    of_version = np.repeat([span.version == version for span in spans], [len(span) for span in positions_of_spans])
    if not recomputed:
        # After a change of version the cache still has keys of the older one, so only the first span is of one version.
        of_version = np.logical_and.accumulate(of_version)
    begins = np.concatenate([np.full(end - start, start) for start, end in join_spans(row)] or [np.zeros(0, int)])
    selected = np.flatnonzero(of_version[: len(row["logprobs"])])
    if not len(selected):
        return None
    positions = np.concatenate(positions_of_spans)[selected]
    ids = torch.from_numpy(np.array(row["token_ids"], dtype=np.int64))
    tokens = Tokens(ids, torch.from_numpy(positions).long(), torch.from_numpy(begins[selected]).long())
    return Rollout(row, tokens, torch.from_numpy(selected))


def cut_first_segment(row: dict[str, Any]) -> dict[str, Any]:
    """Cut a row to the first segment of its rollout."""
    if not row.get("segment_tokens"):
        return row
    end = row["segment_tokens"][0]
    spans = [span for span in row["spans"] if span[1] <= end]
    sampled = sum(span[1] - span[0] for span in spans)
    cut = {name: row[name][:sampled] for name in ("logprobs", "prev_logprobs", "advantages") if row[name] is not None}
    return {**row, **cut, "token_ids": row["token_ids"][:end], "spans": spans}


class Weights:
    """Finds the weights of a run's versions; checkpoints are exported on demand.

    Version N is the policy after N steps; version 0 is the model that the run started from.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        model: folder of the model that the run started from.
        shape: sizes of the model.
        scratch: folder for exported checkpoints.
    """

    def __init__(self, run_dir: Path, config: Config, model: Path, shape: ModelShape, scratch: Path) -> None:
        self._config, self._model, self.shape, self._scratch = config, model, shape, scratch
        resumed = config.checkpointing.resume
        folders = [*run_dir.glob("checkpoints/step_*"), *([Path(resumed)] if resumed else [])]
        numbered = ((folder.name.removeprefix("step_"), folder / POLICY_FOLDER) for folder in folders)
        self._checkpoints = {int(number): folder for number, folder in numbered if number.isdigit() and folder.is_dir()}

    @property
    def versions(self) -> list[int]:
        """Versions whose weights are available, in ascending order."""
        return sorted({0, *self._checkpoints})

    def find_folder(self, version: int) -> Path:
        """Find the folder of a version's weights, in the run's precision.

        Raises:
            RunError: the checkpoint cannot be loaded.
        """
        if version not in self._checkpoints:
            assert version == 0, f"{version} is not among {self.versions}"
            return self._model
        folder = self._scratch / f"version_{version}"
        if not folder.exists():
            policy = self._config.policy
            export_checkpoint(
                self._checkpoints[version],
                self._model,
                self.shape,
                folder,
                precision=policy.precision,
                lora=policy.lora,
                adapters_of=None,
                quantization=None,
            )
        return folder


@dataclass(frozen=True, slots=True)
class Evidence:
    """The recorded rollouts of one step."""

    step: int
    version: int
    """Weight version that sampled most tokens of the step; only its tokens are scored."""
    rows: list[dict[str, Any]]
    """All rollouts of the step that did not fail."""
    rollouts: list[Rollout]
    """Rollouts that are scored."""
    members: list[tuple[int, int]]
    """Group and sample of every recorded rollout of the step, failed ones included."""

    @property
    def is_whole(self) -> bool:
        """Whether every rollout of the step is scored."""
        return len(self.rollouts) == len(self.rows)

    @property
    def recorded_error(self) -> float | None:
        """Mean of exp(abs(trainer - engine)) of all tokens; None: not recorded."""
        pairs = [(row["prev_logprobs"], row["logprobs"]) for row in self.rows]
        if any(prev is None or len(prev) != len(logprobs) for prev, logprobs in pairs):
            return None
        trainer, engine = (torch.from_numpy(np.concatenate(column)).double() for column in zip(*pairs, strict=True))
        sampled = ~trainer.isneginf()  # a filter of sampling removes the others in training
        return float(compute_residual(engine[sampled], trainer[sampled]).exp().mean())

    @property
    def tokens(self) -> list[Tokens]:
        """The scored sequences."""
        return [rollout.tokens for rollout in self.rollouts]

    def read_column(self, name: str) -> Tensor | None:
        """Read a column at the scored tokens, [tokens], float32; None: not recorded."""
        if any(rollout.row[name] is None for rollout in self.rollouts):
            return None
        return torch.cat([rollout.read_column(name) for rollout in self.rollouts])

    @property
    def last(self) -> Tensor:
        """[tokens], bool: true for the last sampled token of a rollout."""
        return torch.cat([rollout.indices == len(rollout.row["logprobs"]) - 1 for rollout in self.rollouts])


def read_evidence(
    run_dir: Path, step: int | None, suspicious: Sequence[int], weights: Weights, config: Config, most_tokens: int
) -> Evidence:
    """Read the rollouts of a step.

    Args:
        run_dir: the run's folder.
        step: a recorded step; None: a suspicious one, else the newest one whose weights are available.
        suspicious: steps whose recorded figures are beyond rounding, the worst first.
        weights: the weights of the run's versions.
        config: the run's configuration.
        most_tokens: sampled tokens to score, of complete rollouts.

    Raises:
        ValueError: nothing is recorded, or the weights of no recorded step are available; the text says what to do.
    """
    files = find_recorded_steps(run_dir)
    if not files:
        raise ValueError(f"{run_dir} has no rollouts; record a run with logger.rollouts=all (docs/debugging.md)")
    if step is not None and step not in files:
        raise ValueError(f"step={step} is not recorded in {run_dir}; there are steps {min(files)} to {max(files)}")
    # Step N trains version N - 1, so steps whose trainer's weights are available come before others.
    newest = sorted(files, key=lambda number: (number - 1 in weights.versions, number))[::-1]
    candidates = [step] if step is not None else [*(number for number in suspicious if number in files), *newest]
    for number in candidates:
        recorded = [cut_first_segment(row) for row in read_rows(number, files[number])]
        rows = [row for row in recorded if row["failure"] is None and row["spans"]]
        version = _find_most_frequent_version(rows)
        if version is not None and version in weights.versions:
            scored = select_scored(rows, version, config, most_tokens)
            if scored:
                return Evidence(number, version, rows, scored, [(row["group"], row["sample"]) for row in recorded])
        if step is not None:
            have = ", ".join(map(str, weights.versions))
            raise ValueError(
                f"step={step} was sampled mostly by version {version}, and there are weights of version(s) {have}; "
                "take a step N + 1 after a checkpoint step_N (checkpointing.save_period)"
            )
    raise ValueError(f"{run_dir} has no recorded step whose weights are available; keep checkpoints, or record step 1")


def _find_most_frequent_version(rows: Sequence[dict[str, Any]]) -> int | None:
    spans = [Span(*span) for span in chain.from_iterable(row["spans"] for row in rows)]
    counts: dict[int, int] = {}
    for span in spans:
        counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return max(counts, key=lambda version: (counts[version], version), default=None)


def select_scored(rows: Sequence[dict[str, Any]], version: int, config: Config, most_tokens: int) -> list[Rollout]:
    """Select rollouts with tokens of a version, up to a number of tokens."""
    recomputed = config.async_sampling.recompute_kv_cache_after_weight_updates
    chosen: list[Rollout] = []
    total = 0
    for row in _order_rows(rows):
        rollout = read_rollout(row, version, recomputed=recomputed)
        if rollout is None:
            continue
        total += len(rollout.indices)
        if chosen and total > most_tokens:
            break
        chosen.append(rollout)
    return sorted(chosen, key=lambda rollout: (rollout.row["group"], rollout.row["sample"]))


def _order_rows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    # Rollouts that differ most take turns with rollouts of all prompts. Samples of a prompt may come from different
    # engines, so each prompt begins with another sample.
    samples = max((row["sample"] for row in rows), default=0) + 1
    rotated = sorted(rows, key=lambda row: ((row["sample"] - row["group"]) % samples, row["group"]))
    differing = sorted((row for row in rows if _measure_difference(row) > 0), key=_measure_difference, reverse=True)
    yielded_rows: set[int] = set()
    for pair in zip_longest(differing, rotated):
        for row in pair:
            if row is not None and id(row) not in yielded_rows:
                yielded_rows.add(id(row))
                yield row


def _measure_difference(row: dict[str, Any]) -> float:
    """Mean absolute difference of both sides' records; 0 if one lacks."""
    if row["prev_logprobs"] is None or len(row["prev_logprobs"]) != len(row["logprobs"]):
        return 0.0
    pairs = torch.tensor(np.array(row["prev_logprobs"])), torch.tensor(np.array(row["logprobs"]))
    return float(compute_residual(*pairs).mean())
