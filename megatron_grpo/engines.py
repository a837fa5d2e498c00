"""Adds engines to a run that goes on, and removes them: python -m megatron_grpo.engines add|remove|list RUN_DIR"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.run.directory import is_alive
from megatron_grpo.run.engine_requests import EngineRequest, EngineStates, read_states, write_request

USAGE = """\
python -m megatron_grpo.engines list RUN_DIR
python -m megatron_grpo.engines add RUN_DIR
python -m megatron_grpo.engines remove RUN_DIR NUMBER [--now]

Shows the engines of a run that goes on, adds one, or removes one. The run takes the request at the beginning of its
next step. A new engine starts beside the others, on free GPUs of the run's Ray cluster, gets the current weights and
then its part of the prompts. One that leaves gets no more prompts, and ends once its rollouts have.

  NUMBER  of the engine, as list shows it
  --now   the engine ends at once, and others begin its unfinished rollouts again
"""
COLUMNS = ("engine", "state", "node", "replaced", "unfinished rollouts")


@as_command("engines", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Show, add or remove engines; return the exit code."""
    parsed = parse_arguments(arguments, {"--now": bool}, most_words=3)
    action, *words = [*parsed.words, ""]
    forms = {"list": 1, "add": 1, "remove": 2}
    if action not in forms or len(words) - 1 != forms[action]:
        raise ValueError("give list or add with the folder of a run, or remove with it and a number; see --help")
    if parsed.options and action != "remove":
        raise ValueError("--now belongs to remove")
    run_dir = Path(os.path.expanduser(words[0]))
    states = _read_states(run_dir)
    if action == "list":
        print(_format_table(states))
        return 0
    if states.refusal is not None:
        raise ValueError(f"engines of {run_dir} can be neither added nor removed: {states.refusal}")
    request = EngineRequest()
    if action == "remove":
        request = EngineRequest(_read_number(words[1], states), now="now" in parsed.options)
    write_request(run_dir, request)
    print(f"asked; the run begins with it at its next step: python -m megatron_grpo.engines list {run_dir}")
    return 0


def _read_states(run_dir: Path) -> EngineStates:
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; give the run_dir of a run, such as outputs/quickstart/latest")
    if not is_alive(run_dir):
        raise ValueError(f"no run is alive in {run_dir}; a start has generation.parallel.data engines")
    try:
        return read_states(run_dir)
    except FileNotFoundError:
        raise ValueError(f"the run in {run_dir} has no engines, or has not begun its first step") from None


def _read_number(word: str, states: EngineStates) -> int:
    serving = [engine.number for engine in states.engines if engine.state == "serving"]
    removable = [engine.number for engine in states.engines if engine.state != "starting"]
    numbers = ", ".join(map(str, removable))
    if not word.isdecimal() or int(word) not in removable:
        raise ValueError(f"{word} is the number of no engine that serves; there is {numbers}")
    if serving == [int(word)]:
        raise ValueError(f"engine {word} is the last one that serves; add another one first")
    return int(word)


def _format_table(states: EngineStates) -> str:
    facts = [
        (engine.number, engine.state, engine.node or "-", engine.restarts, engine.unfinished)
        for engine in states.engines
    ]
    rows: list[Sequence[object]] = [COLUMNS, *facts]
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
