"""Rollouts of the library verifiers, in an interpreter that has it; imports only it and the standard library.

    python verifiers_program.py '{"environment": NAME, "arguments": {}, "folders": []}'

Standard input has requests, a JSON object a line, and standard output has the answers, with the id of the request:

    {"rows": SPLIT}                            {"prompt": ..., "answer": ..., "row": ROW} for each row, {"end": true}
    {"row": ROW, "url": ..., "model": ...}     {"reward": 1.0, "metrics": {}, "error": null}

No process that an environment starts has these streams, so none reads a request or writes an answer.

The classic interface (up to 0.3.1) loads NAME with `load_environment`; from 0.4 on NAME is a taskset.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol, TextIO

TOKEN = "MEGATRON_GRPO_AGENT_API_KEY"
"""Variable that holds the endpoint's token; both interfaces read keys from variables."""

MAX_ERROR_CHARACTERS = 1000  # of an error that an answer repeats
_PR_SET_DUMPABLE = 4

Row = dict[str, Any]


class Library(Protocol):
    """An interface of the library."""

    def list_rows(self, split: str) -> Iterator[Row]:
        """Iterate prompt, answer and row of a split, "train" or "test"."""

    async def run(self, row: Row, url: str, model: str) -> dict[str, Any]:
        """Run and score a rollout; returns its reward, metrics and error."""


class Classic:
    """Environments of `load_environment`."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers

        self._environment = verifiers.load_environment(name, **arguments)

    def list_rows(self, split: str) -> Iterator[Row]:
        environment = self._environment
        dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        for row in dataset:
            answer = row.get("answer")
            yield {"prompt": row["prompt"], "answer": answer if isinstance(answer, str) else "", "row": row}

    async def run(self, row: Row, url: str, model: str) -> dict[str, Any]:
        from verifiers.types import ClientConfig

        # A call that the endpoint gives up fails the rollout, which is attempted again as a whole.
        client = ClientConfig(api_base_url=url, api_key_var=TOKEN, max_retries=0)
        output = await self._environment.run_rollout(row, client, model, {})
        error = output.get("error") and output["error"]["error_chain_repr"]
        return {"reward": output["reward"], "metrics": output["metrics"], "error": error}


class Tasksets:
    """Tasksets of `verifiers.v1`.

    Unless the arguments differ, the harness `null` plays them on this machine.
    """

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        arguments = {**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}}
        if "agent" in vf.env_config_type(name, arguments.get("id", "")).model_fields:
            agent = arguments.get("agent", {})
            harness = {"id": "null", **agent.get("harness", {})}
            arguments["agent"] = {"runtime": {"type": "subprocess"}, **agent, "harness": harness}
        self._environment = vf.load_environment(vf.resolve_env_config(arguments))
        self._serving: Any = None
        for role, config in self._environment.config:
            if isinstance(config, vf.AgentConfig) and isinstance(config.runtime, vf.SubprocessConfig):
                harness = config.harness or vf.default_agent_harness(name)
                if vf.load_harness(harness).EXECUTES_CODE:
                    raise ValueError(
                        f"the harness {harness.id} runs commands of the model, and {role}.runtime.type=subprocess "
                        "would run them on this machine: give a container (docker, podman, apptainer)"
                    )

    def list_rows(self, split: str) -> Iterator[Row]:
        if split != "train":
            raise ValueError("a taskset has no splits; give another one for held-out rows")
        if not self._environment.taskset.bounded:
            raise ValueError("the taskset is infinite")
        for task in self._environment.taskset:
            yield {"prompt": task.data.prompt_text, "answer": "", "row": task.data.model_dump(mode="json")}

    async def run(self, row: Row, url: str, model: str) -> dict[str, Any]:
        import verifiers.v1 as vf

        environment = self._environment
        if self._serving is None:
            self._serving = environment.serving()
            await self._serving.__aenter__()
        kind = type(environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(row), environment.config.taskset.task)
        client = vf.EvalClientConfig(base_url=url, api_key_var=TOKEN)
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, vf.ModelContext(model=model, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            text = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed"
            return {"reward": None, "metrics": {}, "error": text}
        return {
            "reward": sum(trace.reward for trace in episode.traces),
            "metrics": {
                key: value for trace in episode.traces for key, value in trace.metrics.items() if value is not None
            },
            "error": None,
        }


def load_library(name: str, arguments: dict[str, Any]) -> Library:
    """Load an environment by the interface of the installed version."""
    import verifiers

    return (Classic if hasattr(verifiers, "load_environment") else Tasksets)(name, arguments)


def log(text: str) -> None:
    """Write a line to the environment's log."""
    print(f"verifiers process {os.getpid()} {text}", file=sys.stderr, flush=True)


def answer_requests(library: Library, requests: TextIO, answers: TextIO) -> None:
    """Answer requests, one after the other."""
    loop = asyncio.new_event_loop()
    write_answer(answers, "", {"ready": True})
    for line in requests:
        request = parse_request(line)
        if request is None:
            log(f"left out a line that is no request: {line[:200]!r}")
            continue
        name = request["id"]
        try:
            if "rows" in request:
                for row in library.list_rows(request["rows"]):
                    write_answer(answers, name, row)
                write_answer(answers, name, {"end": True})
                continue
            os.environ[TOKEN] = request["token"]
            answer = loop.run_until_complete(library.run(request["row"], request["url"], request["model"]))
            if answer["error"] is not None:
                answer["error"] = str(answer["error"])[:MAX_ERROR_CHARACTERS]
            write_answer(answers, name, answer)
        except Exception as error:  # noqa: BLE001 - of the library or the environment; the rollout fails with it
            write_answer(answers, name, describe_failure(error))


def parse_request(line: str) -> dict[str, Any] | None:
    """Parse a request; None: the line is none."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) and isinstance(request.get("id"), str) else None


def write_answer(answers: TextIO, request: str, answer: dict[str, Any]) -> None:
    """Write the answer to the request with that id."""
    answers.write(json.dumps({"id": request, **answer}, default=to_plain) + "\n")
    answers.flush()


def to_plain(value: Any) -> float | str:
    """Convert what JSON lacks: numbers of NumPy and torch, and other objects."""
    return float(value) if hasattr(value, "__float__") else str(value)


def describe_failure(error: Exception) -> dict[str, Any]:
    """Make the answer that says why there is none."""
    return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}


def take_streams() -> tuple[TextIO, TextIO]:
    """Take standard input and output away from the environment and its processes."""
    # Copies are not inherited by programs that are executed; a process forked without one closes them.
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    stream_fds = [requests.fileno(), answers.fileno()]
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # prints of an environment go to the log

    def close_streams() -> None:
        for fd in stream_fds:  # the objects would flush what they hold
            os.dup2(nowhere, fd)

    os.register_at_fork(after_in_child=close_streams)
    # Another process of this user can neither open the streams in /proc nor read this one's memory.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))
    return requests, answers


def main() -> None:
    requests, answers = take_streams()
    settings = json.loads(sys.argv[1])
    name = settings["environment"]
    log(f"loads {name}")
    sys.path += settings["folders"]
    try:
        library = load_library(name, settings["arguments"])
    except Exception as error:  # noqa: BLE001 - of the library or the environment; the start reports it
        write_answer(answers, "", describe_failure(error))
        return
    log(f"plays {name}")
    answer_requests(library, requests, answers)
    log("ends: no more requests")


if __name__ == "__main__":
    main()
