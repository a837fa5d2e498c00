"""Plans a run without GPUs: memory, time, layouts: python -m megatron_grpo.plan +exp=… cluster.gpu=h100"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.overrides import OPTION

USAGE = """\
python -m megatron_grpo.plan +exp=NAME cluster.gpu=h100 [cluster.nodes=N] [key=value …] [--search]
                               [--json] [--html FILE]

  +exp=NAME      a recipe, and keys of it to change, as for megatron_grpo.train; plan.* are the plan's own
  cluster.gpu=G  a100, a100-40gb, a800, h20, h100, h200, l40s, b200, b300 or gb200; or plan.hardware=FILE.yaml
  --search       try other layouts on the same GPUs; plan.search_s limits the seconds
  --json         print one JSON object instead of a table
  --html FILE    also write one page with pictures of memory and time

python -m megatron_grpo.plan calibrate RUN_DIR [cluster.gpu=h100] [trust_run=true] [--out FILE.yaml]

  fits the profile to a run's metrics and lengths, says by how much the plan was off, and writes the profile for
  plan.hardware=FILE.yaml; with trust_run=true the run's config.yaml may name code to import

Says whether a run fits, and how long a step takes, from dry runs of its ranks; needs no GPU and no weights, only the
model's config.json. Exit code 1: the run does not fit.
"""

_OPTIONS = {"--search": bool, "--json": bool, "--html": Path, "--out": Path}


@as_command("plan", USAGE, failures=(RunError,))
def main(arguments: Sequence[str]) -> int:
    """Plan a run, or calibrate a profile; return the exit code."""
    parsed = parse_arguments(arguments, _OPTIONS, is_override=lambda name: name == OPTION or not name.startswith("--"))
    from megatron_grpo.planning import answers  # here, because torch takes long to import

    if parsed.overrides[:1] == ["calibrate"]:
        return answers.fit_profile(parsed.overrides[1:], parsed.options.get("out"))
    return answers.plan_run(parsed.overrides, parsed.options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
