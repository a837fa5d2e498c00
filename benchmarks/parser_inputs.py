"""Times vLLM's parsers of tool calls and reasoning on degenerate loops of their own marks; prints JSON.

    python benchmarks/parser_inputs.py [--longest 8000] [--seconds 4] [--only NAME]

Every parser reads, in a process of its own, eight kinds of loops of 1000 marks, then twice as many, until one takes
more than the seconds or the longest is read. The row of a parser has its worst kind: length in marks, processor
seconds, and the power of the length by which the last doubling grew (1 linear, 2 quadratic, 3 cubic; below 0.05 s:
not told).
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

from header import header
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.environments.vllm_parsers import read_parser_names
from megatron_grpo.rollouts.output_parser import OutputParser

MARK = re.compile(r"<[^<>\s{}]{1,40}>|\[/?[A-Z_]{2,20}\]|<[|｜][^<>]{1,40}[|｜]>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
LEAST_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    OutputParser(make_tokenizer(["<tool_call>", "</tool_call>"]), "hermes", None)  # imports vLLM before the forks
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
    """Find what looks like marks of calls or thinking in a parser's source, and in those of vLLM that it imports."""
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
            other = root.parent / (node.module or "").replace(".", "/")
            if (
                other.with_suffix(".py").is_file()
                and other.parent.name in ("parser", folder)
                and "abstract" not in other.name
            ):
                trees.append(ast.parse(other.with_suffix(".py").read_text()))
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
    worst: dict[str, Any] = {}
    for loop, make in list_loops(marks).items():
        before, length = 0.0, 1000
        while length <= options.longest:
            seconds = time_in_child(kind, name, marks, make(length), options.seconds)
            if isinstance(seconds, str):
                return {"does not load here": seconds}
            grows = round(math.log2(seconds / before), 1) if before > LEAST_S / 4 and seconds > LEAST_S else None
            row = {
                "worst": loop,
                "marks": length,
                "characters": len(make(length)),
                "cpu_s": round(seconds, 3),
                "power": grows,
            }
            worst = row if seconds > worst.get("cpu_s", -1) else worst
            if seconds >= options.seconds:
                break
            before, length = seconds, 2 * length
    return worst


def time_in_child(kind: str, name: str, marks: list[str], text: str, seconds: float) -> float | str:
    """Processor seconds of one response, at most `seconds`; a text: why the parser does not load."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        tokenizer = make_tokenizer(marks)
        try:
            reader = OutputParser(tokenizer, name if kind == "tool" else None, name if kind == "reasoning" else None)
        except Exception as error:  # noqa: BLE001 - parsers of models with tokenizers of their own
            os.write(writing, json.dumps(str(error)[:200]).encode())
            os._exit(0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ids = __import__("numpy").array(tokenizer(text)["input_ids"])
        signal.setitimer(signal.ITIMER_PROF, seconds)
        began = time.process_time()
        reader.read([TOOL], {}, ids, text, 0)
        os.write(writing, json.dumps(time.process_time() - began).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        written = answer.read()
    os.waitpid(child, 0)
    return json.loads(written) if written else seconds


if __name__ == "__main__":
    main()
