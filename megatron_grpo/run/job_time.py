"""The time that is left to a run's job, which has to hold a last step and its checkpoint."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

END_VARIABLE = "SLURM_JOB_END_TIME"  # seconds since the epoch; Slurm sets it for the processes of a job
MARGIN = 1.5  # of the time that the next step and the last save are expected to take


@dataclass(slots=True)
class JobTime:
    """Tells when a run has to end to save in time.

    Saves and steps of large models take minutes: what is not saved when a job ends is lost, a whole save period of all
    its GPUs.
    """

    end: float | None  # of the job, in seconds since the epoch; None: it has no end that is known
    slowest_step_s: float = 0.0

    @classmethod
    def from_environment(cls) -> JobTime:
        """Read the end of the job from the environment."""
        value = os.environ.get(END_VARIABLE, "")
        return cls(float(value) if value.isdecimal() else None)

    def note_step(self, seconds: float) -> None:
        """Remember the seconds of a step and its validation, without its save."""
        self.slowest_step_s = max(self.slowest_step_s, seconds)

    def explain_end(self, save_s: float | None) -> str | None:
        """Say why no further step fits into the job; None: one fits.

        `save_s`: seconds of the last save; None: there was none yet, which is taken to be as long as a step.
        """
        if self.end is None or not self.slowest_step_s:
            return None
        save_s = self.slowest_step_s if save_s is None else save_s
        left_s = self.end - time.time()
        if left_s >= MARGIN * (self.slowest_step_s + save_s):
            return None
        needs = f"a step takes up to {self.slowest_step_s:.0f} s and a save {save_s:.0f} s"
        return f"the job ends in {max(left_s, 0):.0f} s ({END_VARIABLE}), and {needs}"
