"""What the commands share: their arguments, --help and --version, error lines and exit codes."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.config.conversion import convert_argument
from megatron_grpo.config.errors import RunError, suggest_name
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.key_search import format_search
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.outside_text import replace_controls
from megatron_grpo.config.overrides import OPTION

# Exit codes: a failure, a command line that cannot be run, Ctrl-C, SIGTERM.
FAILED, MISTAKE, INTERRUPTED, TERMINATED = 1, 2, 130, 143

Command = Callable[[Sequence[str]], int]  # takes the arguments, returns the exit code


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Arguments of a command, sorted by their form.

    Example: for `RUN_DIR step=3 policy.precision=float32 --json`
        CommandLine(options={"step": 3, "json": True}, overrides=["policy.precision=float32"], words=["RUN_DIR"])
    """

    options: dict[str, Any] = field(default_factory=dict)
    """Converted values of the command's own options, by name: gb_per_s for --gb-per-s=50."""
    overrides: list[str] = field(default_factory=list)  # arguments that belong to the configuration, unchanged
    words: list[str] = field(default_factory=list)  # arguments without = and without dashes

    def require(self, name: str, form: str) -> Any:
        """Return an option; ValueError if it is missing, with its `form`."""
        if not self.options.get(name):
            raise ValueError(f"{name}={form} is missing; --help shows the arguments")
        return self.options[name]


def parse_arguments(
    arguments: Sequence[str],
    options: Mapping[str, Any],
    *,
    most_words: int = 0,
    is_override: Callable[[str], bool] = lambda name: False,
) -> CommandLine:
    """Sort the arguments of a command by their form, and convert its options.

    `options` has the type of each option by its name as it is written: step=N for "step", --json for "--json" of type
    bool, and --html FILE or --html=FILE for "--html" of another type. `is_override(name)` is true for the name of an
    argument that belongs to the configuration. At most `most_words` arguments are paths.

    ValueError: an argument is unknown, or its value is of another type.
    """
    parsed = CommandLine()
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, text = argument.partition("=")
        kind, has_dashes = options.get(name), name.startswith("--")
        option = name.removeprefix("--").replace("-", "_") if has_dashes else name
        if kind is bool and has_dashes and not equals:
            parsed.options[option] = True
        elif kind is not None and kind is not bool and has_dashes:
            text = text or next(remaining, "")
            if not text:
                raise ValueError(f"{name} needs a value")
            parsed.options[option] = convert_argument(name, text, kind)
        elif kind is not None and equals and not has_dashes:
            parsed.options[option] = convert_argument(name, text, kind)
        elif len(parsed.words) < most_words and _is_path(argument):
            parsed.words.append(argument)
        elif is_override(name):
            parsed.overrides.append(f"{name}={next(remaining, '')}" if argument == OPTION else argument)
        else:
            forms = [option if option.startswith("--") else f"{option}=" for option in options]
            raise ValueError(f"{argument} is not an argument{suggest_name(f'{name}=', forms)}")
    return parsed


def _is_path(argument: str) -> bool:
    """True for a path: outputs/lr=0.1, step_1.5, or a folder here called lr=0.1."""
    name, equals, _ = argument.partition("=")
    if name.startswith(("-", "+")):
        return False
    # Names of keys have no slash, and ~ before the name of a key removes it.
    return "/" in name or os.path.exists(argument) or not (equals or name.startswith("~"))


def as_command(name: str, usage: str, failures: tuple[type[Exception], ...] = ()) -> Callable[[Command], Command]:
    """Make a function a command, with --help, --version and error messages.

    An error becomes a line on standard error; the exit code is FAILED for `failures`, else MISTAKE.
    """

    def wrap(body: Command) -> Command:
        @functools.wraps(body)
        @tolerant_output()
        def main(arguments: Sequence[str]) -> int:
            try:
                return 0 if answer_help(arguments, usage) else body(arguments)
            except (ValueError, RunError, OSError) as error:
                print(replace_controls(hide_secrets(f"{name}: {error}")), file=sys.stderr)
                return FAILED if isinstance(error, failures) else MISTAKE
            except KeyboardInterrupt as error:
                return report_interruption(error)

        return main

    return wrap


def answer_help(arguments: Sequence[str], usage: str) -> bool:
    """Print usage, what matches the word after --help, or the version, if asked."""
    asking = [number for number, argument in enumerate(arguments) if argument in ("-h", "--help")]
    if asking:
        words = [word for word in arguments[asking[0] + 1 :] if not word.startswith("-")]
        print(format_search(words[0]) if words else usage, end="")
    elif "--version" in arguments:
        print(f"megatron_grpo {find_version()}")
    return bool(asking) or "--version" in arguments


def find_version() -> str:
    """Find the version of the installed package."""
    try:
        return importlib.metadata.version("megatron_grpo")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def report_interruption(error: KeyboardInterrupt) -> int:
    """Print a line with the notes of an interruption; return the exit code."""
    print("; ".join(["interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
    return TERMINATED if "SIGTERM" in error.args else INTERRUPTED


@contextmanager
def silence_packages() -> Iterator[None]:
    """Hide what packages warn and log about their fallbacks, and their progress bars."""
    # Processes that the body starts inherit the variables.
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
