"""Environments of verifiers' classic interface: one turn, tools, several turns."""

from __future__ import annotations

import os
from typing import Any

import verifiers as vf
from datasets import Dataset


def make_rows(count: int) -> Dataset:
    return Dataset.from_list([{"question": f"{n}+{n}=", "answer": str(2 * n), "info": {"n": n}} for n in range(count)])


def last_text(completion: Any) -> str:
    message = completion[-1]
    content = message["content"] if isinstance(message, dict) else message.content
    return str(content or "")


async def exact(completion: Any, answer: str) -> float:
    return float(last_text(completion) == answer)


async def short(completion: Any) -> float:
    return 1 / (1 + len(last_text(completion)))


async def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n


class Guesses(vf.MultiTurnEnv):
    """The model guesses until it has the answer."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if last_text(messages) == "die":
            os._exit(3)
        if last_text(messages) == "raise":
            raise vf.Error("the world is gone")
        is_right = last_text(messages) == state["answer"]
        answer = [vf.UserMessage(content="right" if is_right else "wrong")]
        if is_right:
            state["final_env_response"] = answer
        return answer


def load_environment(kind: str = "single", rows: int = 4) -> vf.Environment:
    print("a print of an environment is no answer")
    rubric = vf.Rubric(funcs=[exact, short], weights=[1.0, 0.5])
    settings = {"dataset": make_rows(rows), "eval_dataset": make_rows(2), "rubric": rubric}
    if kind == "tools":
        return vf.ToolEnv(tools=[double], max_turns=4, **settings)
    if kind == "turns":
        return Guesses(max_turns=3, **settings)
    return vf.SingleTurnEnv(system_prompt="Add.", **settings)
