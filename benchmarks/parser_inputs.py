"""Times vLLM's parsers of tool calls and reasoning on degenerate loops of their own marks; prints JSON.

    python benchmarks/parser_inputs.py [--longest 8000] [--seconds 4] [--only NAME]

Every parser reads, in a process of its own, eight kinds of loops of 250 marks, then twice as many, until one takes
more than the seconds or the longest is read. The row of a parser has its worst kind: length in marks, processor
seconds, and the power of the length by which the last doubling that was done grew (1 linear, 2 quadratic, 3 cubic;
null: too short to tell). `stopped`: it took more than `seconds`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import logging
import math
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from header import header
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.environments.vllm_parsers import read_parser_names
from megatron_grpo.rollouts.call_texts import TextReader

MARK = re.compile(r"<[^<>\s{}]{1,40}>|\[/?[A-Z_]{2,20}\]|<[|｜][^<>]{1,40}[|｜]>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
LEAST_S = 0.02  # shorter times tell no power
SHORTEST = 250  # marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    TextReader(make_tokenizer(["<tool_call>", "</tool_call>"]), "hermes", None)  # imports vLLM before the forks
    rows = [
        {"parser": name, "of": kind, **measure(kind, name, options)}
        for kind, folder in (("tool", "tool_parsers"), ("reasoning", "reasoning"))
        for name in sorted(read_parser_names(folder))
        if options.only in name
    ]
    print(json.dumps({**header("parser_inputs"), "seconds": options.seconds, "parsers": rows}, indent=1))


def make_tokenizer(marks: list[str]) -> Any:
    letters = [*map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.add_special_tokens(marks)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def find_marks(folder: str, name: str) -> list[str]:
    """Find what looks like marks of calls or thinking in the sources of a parser and its imports."""
    root = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    table = ast.parse((root / folder / "__init__.py").read_text())
    files = [
        ast.literal_eval(node.value)
        for node in table.body
        if isinstance(node, ast.Assign) and "REGISTER" in ast.unparse(node.targets[0])
    ]
    file = root / folder / f"{files[0][name][0]}.py"
    trees = [ast.parse(file.read_text())]
    for node in ast.walk(trees[0]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            path = root.parent / (node.module or "").replace(".", "/")
            if (
                path.with_suffix(".py").is_file()
                and path.parent.name in ("parser", folder)
                and "abstract" not in path.name
            ):
                trees.append(ast.parse(path.with_suffix(".py").read_text()))
    texts = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return list(dict.fromkeys(mark for text in texts if len(text) < 300 for mark in MARK.findall(text)))[:16]


def list_loops(marks: list[str]) -> dict[str, Callable[[int], str]]:
    first, second = (marks or ["["])[0], (marks or ["[", "f("])[1 % max(len(marks), 1)]
    third, every = (marks or ["{"])[2 % max(len(marks), 1)], "".join(marks) or "[f("
    return {
        "the first mark": lambda n: first * n,
        "the first two marks": lambda n: (first + second) * (n // 2),
        "all marks in turn": lambda n: every * (n // max(len(marks), 1)),
        "the first, then the others": lambda n: first + "".join(marks[1:]) * (n // max(len(marks) - 1, 1)),
        "the first, then the third and last": lambda n: first + (third + (marks or ["("])[-1]) * (n // 2),
        "brackets that open": lambda n: first + '{"a":[' * (n // 4),
        "a call's beginning": lambda n: first + "[f(a=" * (n // 4) + '{"name": "f", "arguments": {',
        "lines of a call": lambda n: first + f'f\n{second}a{third}"b"\n' * (n // 4),
    }


def measure(kind: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    marks = find_marks("tool_parsers" if kind == "tool" else "reasoning", name)
    loops = list_loops(marks)
    lengths = [SHORTEST * 2**step for step in range(10) if SHORTEST * 2**step <= options.longest]
    jobs = [(loop, length) for loop in loops for length in lengths]
    times: dict[tuple[str, int], float] = {}
    while jobs:
        measured = time_in_child(kind, name, marks, [loops[loop](length) for loop, length in jobs], options.seconds)
        if isinstance(measured, str):
            return {"does not load here": measured}
        times |= dict(zip(jobs, measured, strict=False))
        stopped, jobs = jobs[len(measured) : len(measured) + 1], jobs[len(measured) + 1 :]
        times |= dict.fromkeys(stopped, options.seconds)  # its longer ones would be stopped, too
        jobs = [job for job in jobs if not stopped or job[0] != stopped[0][0]]
    (loop, length), seconds = max(times.items(), key=lambda pair: (pair[1], -pair[0][1]))
    # Of the two longest that were done and long enough to tell.
    measured_lengths = [
        times[loop, size] for size in lengths if LEAST_S < times.get((loop, size), 0.0) < options.seconds
    ]
    return {
        "worst": loop,
        "marks": length,
        "characters": len(loops[loop](length)),
        "cpu_s": round(seconds, 3),
        "stopped": seconds >= options.seconds,
        "power": round(math.log2(measured_lengths[-1] / measured_lengths[-2]), 1)
        if len(measured_lengths) > 1
        else None,
    }


def time_in_child(kind: str, name: str, marks: list[str], texts: list[str], seconds: float) -> list[float] | str:
    """Processor seconds of the responses before one that takes too long; a text: why the parser does not load."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        tokenizer = make_tokenizer(marks)
        try:
            reader = TextReader(tokenizer, name if kind == "tool" else None, name if kind == "reasoning" else None)
        except Exception as error:  # noqa: BLE001 - parsers of models with tokenizers of their own
            os.write(writing, json.dumps(str(error)[:200]).encode() + b"\n")
            os._exit(0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for text in texts:
            ids = np.array(tokenizer(text)["input_ids"])
            signal.setitimer(signal.ITIMER_PROF, seconds)
            began = time.process_time()
            reader.read([TOOL], {}, ids, text, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(writing, json.dumps(time.process_time() - began).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        lines = [json.loads(line) for line in answer]
    os.waitpid(child, 0)
    return lines[0] if lines and isinstance(lines[0], str) else lines


if __name__ == "__main__":
    main()
