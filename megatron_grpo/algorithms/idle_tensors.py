"""Reports tensors whose gradient is exactly zero from some step on: frozen, cut off, or without use."""

from __future__ import annotations

from collections import defaultdict

from megatron_grpo.algorithms.context import GRPOSaveState, IdleTensorState
from megatron_grpo.trainer.model_ranks import TrainResult

# Steps in a row without gradient after which a tensor is reported. Adapters begin with one such step, since their
# second matrix is zero then.
IDLE_STEPS = 3
# An expert may be chosen by no token for a while, which is no fault. Experts are reported every so many steps.
IDLE_EXPERT_STEPS = 50
NAMED = 6  # tensors that a message names


def describe_idle_tensors(state: GRPOSaveState, step: int, learned: TrainResult | None) -> list[str]:
    """Describe tensors that have been without gradient for long; each once in a run.

    A step whose whole gradient is zero, as with equal rewards in all groups, says nothing about a tensor.
    """
    if learned is None or not learned.grad_norm:
        return []
    previous = state.get("idle_tensors")
    if previous is None and not learned.zero_gradients:
        return []
    idle = previous or IdleTensorState(since={}, reported=[])
    since = {name: idle["since"].get(name, step) for name in sorted(learned.zero_gradients)}
    due: defaultdict[int, list[str]] = defaultdict(list)
    for name in since.keys() - set(idle["reported"]):
        is_expert = ".experts." in name
        is_due = step - since[name] + 1 >= (IDLE_EXPERT_STEPS if is_expert else IDLE_STEPS)
        if is_due and (not is_expert or step % IDLE_EXPERT_STEPS == 0):
            due[since[name]].append(name)
    reported = [*idle["reported"], *(name for names in due.values() for name in names)]
    state["idle_tensors"] = IdleTensorState(since=since, reported=reported)
    return [_describe(sorted(names), first) for first, names in sorted(due.items())]


def _describe(names: list[str], first: int) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    subject = "the gradient of a tensor has" if len(names) == 1 else f"the gradients of {len(names)} tensors have"
    return (
        f"{subject} been exactly zero since step {first}: {', '.join(names[:NAMED])}{rest}. They do not learn: "
        "nothing in the loss depends on them, or they were frozen or cut off by mistake (an expert may have no tokens)"
    )
