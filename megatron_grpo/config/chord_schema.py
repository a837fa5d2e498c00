"""The keys of CHORD: demonstrations beside GRPO's samples."""

from __future__ import annotations

import math

from megatron_grpo.config.section import NonNegative, PathText, Positive, Section, Share


class ChordConfig(Section):
    """Demonstrations of algorithm=chord; docs/algorithms.md has the formulas."""

    train_path: PathText | None = None
    """Rows with demonstrated responses: a file, folder or hub name, as for data.train_path."""

    train_split: str = "train"
    """Split of train_path, where that is a hub name or a folder."""

    response_key: str | None = None
    """Column with the demonstrated response, as data.response_key of algorithm=sft. null: the prompt column has whole
    conversations, and all turns of the assistant are learnt."""

    rows_per_step: Positive = 32
    """Demonstrations of a step, of which each replica of the policy needs one. Each epoch over them has a new order."""

    peak_weight: Share = 0.9
    """Largest weight mu of the demonstrations' likelihood; GRPO's loss has 1 - mu."""

    final_weight: Share = 0.05
    """Weight mu from step warmup_steps + decay_steps on."""

    warmup_steps: NonNegative = 0
    """Steps in which mu rises evenly from 0 to peak_weight."""

    decay_steps: NonNegative = 200
    """Steps after those in which mu falls to final_weight, along half a cosine."""

    favours_uncertain: bool = False
    """CHORD-phi: each token counts with p (1 - p), where p is its probability: most where the policy is uncertain."""

    def find_weight(self, step: int) -> float:
        """Find mu of a step, from 1 on."""
        earlier_steps = step - 1
        if earlier_steps < self.warmup_steps:
            return self.peak_weight * earlier_steps / self.warmup_steps
        if earlier_steps >= self.warmup_steps + self.decay_steps:
            return self.final_weight
        fall = 0.5 * (1 + math.cos(math.pi * (earlier_steps - self.warmup_steps) / self.decay_steps))
        return self.final_weight + (self.peak_weight - self.final_weight) * fall
