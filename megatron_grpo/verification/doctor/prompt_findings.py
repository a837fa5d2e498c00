"""Compares recorded prompts with those that the configuration, or other data settings, make of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.verification.doctor.damage import CHANGED
from megatron_grpo.verification.doctor.diagnosis import Finding
from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.law import Tokens
from megatron_grpo.verification.doctor.prompts import Rendering, iterate_other_renderings, render_configured


class Prompts:
    """The prompts of a step's rollouts, made again from the data.

    Args:
        config: the run's configuration.
        model: folder with the tokenizer.
        rows: the recorded rollouts of the step.
        remarks: gets the reason if the prompts cannot be made again.
    """

    def __init__(self, config: Config, model: Path, rows: Sequence[dict[str, Any]], remarks: list[str]) -> None:
        self._config, self._model, self._rows, self._remarks = config, model, rows, remarks

    @cached_property
    def _configured(self) -> Rendering | None:
        """The configured prompts; None: they cannot be made again."""
        try:
            if self._config.generation.endpoint.enabled:
                raise ValueError("generation.endpoint.enabled=true: agents write the prompts")
            return render_configured(self._config, self._model, sorted({row["prompt_idx"] for row in self._rows}))
        except (ValueError, RunError, OSError) as error:
            self._remarks.append(f"prompts were not compared with the data: {error}")
            return None

    @cached_property
    def _candidates(self) -> list[Rendering]:
        if self._configured is None:
            return []
        return list(iterate_other_renderings(self._config, self._model, sorted(self._configured.prompts)))

    def find_mistakes(self) -> Iterator[Finding]:
        """Find recorded prompts that are not the configured ones."""
        expected = self._configured
        if expected is None:
            return
        rows = {row["prompt_idx"]: row for row in self._rows}
        wrong = [row for row in self._rows if expected.prompts[row["prompt_idx"]] != _read_prompt_ids(row)]
        if not wrong:
            return
        wrong_prompts = {row["prompt_idx"] for row in wrong}
        matching = [
            candidate
            for candidate in self._candidates
            if all(candidate.prompts.get(row["prompt_idx"]) == _read_prompt_ids(row) for row in wrong)
        ]
        if matching:
            reason = f"they are those of {matching[0].text}"
        else:
            where = _find_first_difference(wrong[0], expected.prompts[wrong[0]["prompt_idx"]])
            reason = f"no other template gives them: the data has changed, or the record was edited ({where})"
        counted = f"{len(wrong_prompts)} of {len(rows)} recorded prompts"
        text = f"{counted} are not what the configuration makes of the data; {reason}"
        # If all prompts are wrong the configuration is; if some are and no setting makes them, the record was edited.
        if matching or len(wrong) == len(self._rows):
            yield Finding("wrong_template", "tokens", text, matching[0].key if matching else expected.key)
        else:
            yield Finding("damaged_record", "record", text, CHANGED)

    def build_other_sequences(self, rollouts: Sequence[Rollout]) -> dict[str, tuple[str, Sequence[Tokens]]]:
        """By data setting, its key and the rollouts behind its prompts."""
        settings = [] if self._configured is None else [self._configured, *self._candidates]
        sequences: dict[str, tuple[str, Sequence[Tokens]]] = {}
        for setting in settings:
            prompts = [setting.prompts[rollout.row["prompt_idx"]] for rollout in rollouts]
            if all(prompts):  # an empty prompt predicts no first token
                behind = [rollout.replace_prompt(prompt) for rollout, prompt in zip(rollouts, prompts, strict=True)]
                sequences[setting.text] = (setting.key, behind)
        return sequences


def _read_prompt_ids(row: dict[str, Any]) -> list[int]:
    ids: list[int] = row["token_ids"][: row["spans"][0][0]].tolist()
    return ids


def _find_first_difference(row: dict[str, Any], expected: Sequence[int]) -> str:
    """Find the first unexpected token of a recorded prompt."""
    recorded = _read_prompt_ids(row)
    pairs = enumerate(zip(recorded, expected, strict=False))
    position = next((number for number, (first, second) in pairs if first != second), min(len(recorded), len(expected)))
    ids = [str(prompt[position]) if position < len(prompt) else "nothing" for prompt in (recorded, expected)]
    where = f"prompt {row['prompt_idx']}, sample {row['sample']}, token {position} of the prompt"
    return f"{where}: recorded {ids[0]}, expected {ids[1]}"
