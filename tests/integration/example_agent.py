"""Agents of a user: functions that ask the model with OpenAI's own client."""

from collections.abc import Sequence
from typing import Any

from megatron_grpo.data.scores import ModelAccess

QUESTIONS = ["", "x1", "y22"]
"""What the user says in each turn; in the first, the prompt."""


def talkative(prompt: str, access: ModelAccess, **columns: Any) -> list[list[int]]:
    """Asks three times, and returns the tokens that it was told were sampled."""
    from openai import OpenAI

    client = OpenAI(base_url=access.base_url, api_key=access.token, max_retries=0, timeout=60)
    messages: list[Any] = []
    sampled = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question or prompt})
        answer = client.chat.completions.create(
            model=access.model, messages=messages, max_tokens=5, logprobs=True, temperature=0.7
        )
        (choice,) = answer.choices
        sampled.append(list(choice.model_extra["token_ids"]))
        messages.append(choice.message.model_dump(exclude_none=True))
    if prompt == "edits":
        messages[1] = {"role": "assistant", "content": "e"}
        answer = client.chat.completions.create(model=access.model, messages=messages[:3], max_tokens=5, n=2)
        sampled += [list(choice.model_extra["token_ids"]) for choice in answer.choices]
    return sampled


async def single(prompt: str, access: ModelAccess, **columns: Any) -> str:
    """Asks once, for the completion of a text, with the asynchronous client."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=access.base_url, api_key=access.token)
    answer = await client.completions.create(model=access.model, prompt=prompt)
    return answer.choices[0].text


async def twice(prompt: str, access: ModelAccess, **columns: Any) -> int:
    """Asks for a short answer, and for what follows it and a digit; returns the characters of both."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=access.base_url, api_key=access.token)
    first = await client.completions.create(model=access.model, prompt=prompt, max_tokens=1)
    text = prompt + first.choices[0].text + "1"
    second = await client.completions.create(model=access.model, prompt=text, max_tokens=2)
    return len(first.choices[0].text) + len(second.choices[0].text)


def longer(completions: Sequence[Any], agent_result: Sequence[int], **_: Any) -> list[float]:
    """A character more, a point more."""
    return [float(characters) for characters in agent_result]


def long(completions: Sequence[Any], agent_result: Sequence[list[list[int]]], **columns: Any) -> list[float]:
    """A token more, a point more."""
    return [float(sum(len(turn) for turn in result)) for result in agent_result]


def exact(completions: Sequence[Any], answer: Sequence[str], agent_result: Sequence[str], **_: Any) -> list[float]:
    """1 for an agent that returns the answer."""
    assert list(completions) == list(agent_result), "a single turn: what the model wrote is what the agent has"
    return [float(result == right) for result, right in zip(agent_result, answer, strict=True)]
