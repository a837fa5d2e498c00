"""`python -m megatron_grpo.train` whose driver kills or stops the policy's last rank at moments of the variable FAULTS.

A fault is MOMENT:CALL:SIGNAL: just before the n-th call of a moment's function, counted from 1. Commas separate faults.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_grpo.algorithms import loop
from megatron_grpo.command import main
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.trainer.model_ranks import MegatronPolicy, MegatronValue, ModelRanks
from megatron_grpo.weight_sync.transport import WeightTransport

MOMENTS: dict[str, tuple[Any, str]] = {
    "generation": (RolloutPool, "finish"),
    "log-probabilities": (ModelRanks, "add_field"),
    "training": (ModelRanks, "train"),
    "refit": (WeightTransport, "publish"),
    "checkpoint": (ModelRanks, "save_checkpoint"),
    "validation": (loop, "validate"),
    "restart": (ModelRanks, "load_checkpoint"),
}
"""The function whose calls are a moment, by its name."""


def inject(faults: str) -> None:
    """Patch the functions before which faults happen."""
    planned: dict[tuple[str, int], int] = {}
    for fault in faults.split(","):
        moment, call, number = fault.split(":")
        planned[moment, int(call)] = int(number)
    calls: Counter[str] = Counter()
    models: list[ModelRanks] = []
    kind: Any = MegatronValue if "FAULTY_VALUE" in os.environ else MegatronPolicy
    wait_ready = ModelRanks.wait_ready

    def remember(model: ModelRanks) -> None:
        wait_ready(model)
        if isinstance(model, kind):
            models[:] = [model]

    def patch(moment: str, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[moment] += 1
            if number := planned.get((moment, calls[moment])):
                pid, _ = models[0]._reports[-1].processes.started[0]
                print(f"fault at {time.time():.3f}: signal {number} to {pid} in {moment}", flush=True)
                os.kill(pid, number)
            return function(*args, **kwargs)

        setattr(owner, name, call)

    ModelRanks.wait_ready = remember  # type: ignore[method-assign]
    for moment, (owner, name) in MOMENTS.items():
        patch(moment, owner, name)


if __name__ == "__main__":
    inject(os.environ["FAULTS"])
    sys.exit(main(sys.argv[1:]))
