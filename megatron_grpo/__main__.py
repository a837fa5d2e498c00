"""Lists the commands: python -m megatron_grpo."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_grpo.config.command_line import MISTAKE, answer_help
from megatron_grpo.config.errors import suggest_name
from megatron_grpo.config.help import COMMANDS, format_commands
from megatron_grpo.config.output import tolerant_output


@tolerant_output()
def main(arguments: Sequence[str]) -> int:
    """Print the commands, or the version."""
    if answer_help(arguments or ["--help"], format_commands()):
        return 0
    hint = suggest_name(arguments[0], COMMANDS, "python -m megatron_grpo.{}", otherwise="")
    print(f"{arguments[0]} is not run this way{hint}\n\n{format_commands()}", end="", file=sys.stderr)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
