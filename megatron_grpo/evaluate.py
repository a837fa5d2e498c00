"""Evaluates a model on held-out prompts: python -m megatron_grpo.evaluate checkpoint=… data.val_path=… output=DIR"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_grpo.cluster.machines import prepare_ray_environment
from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import as_command
from megatron_grpo.config.errors import RunError

USAGE = """\
python -m megatron_grpo.evaluate checkpoint=PATH output=DIR [data.val_path=SET] [key=value ...]

Samples responses with vLLM, scores them as validation does, and writes DIR/results.json and DIR/samples.jsonl.

  checkpoint     RUN_DIR/checkpoints/step_N (or best, latest), evaluated under its run's configuration; or a folder in
                 Hugging Face format, whose configuration the command line gives (+exp=RECIPE, env.*, data=gsm8k)
  output         folder to write; must not exist yet
  data.val_path  a file of prompts, a folder or a hub name, or [file,file]; by default all validation sets of the
                 configuration, data.val_sets among them
  samples        responses to each prompt (1)
  temperature    0 is greedy; by default 0 for one sample, and generation.temperature for more
  k              of pass@k and cons@k, such as [1,4] ([1])
  compare        output of an earlier evaluation to compare with, prompt by prompt
  trust_run      true: the run's config.yaml may start the programs, code and connections that it names (false)
  section.key    any other key of the configuration, such as generation.max_new_tokens=512
"""
_TESTS = {"wilcoxon_p": "Wilcoxon", "mcnemar_p": "McNemar"}


@as_command("evaluate", USAGE, failures=(RunError, OSError))
def main(arguments: Sequence[str]) -> int:
    """Evaluate, and print the results; return the exit code."""
    from megatron_grpo.evaluation.request import read_request  # here, because torch takes long to import

    request = read_request(arguments)
    if request.config.cluster.ray_address is None:
        prepare_ray_environment()
    # After the checks, because Ray takes long to import.
    from megatron_grpo.evaluation.checkpoint_scores import evaluate

    with announce_waits():
        results = evaluate(request)
    for name, figures in results["sets"].items():
        print(f"{name}: {figures['prompts']} prompts, {results['samples']} response(s) each")
        for figure, value in figures.items():
            if isinstance(value, dict) and "mean" in value:
                print(f"  {figure:9} {value['mean']:.4f}  [{value['low']:.4f}, {value['high']:.4f}]")
    for name, figures in results.get("compared", {}).get("sets", {}).items():
        if figures["prompts"]:
            difference = figures["difference"]
            interval = f"[{difference['low']:+.4f}, {difference['high']:+.4f}]"
            tests = [f"{test} p={figures[key]:.3g}" for key, test in _TESTS.items() if key in figures]
            print(f"{name}, compared: {difference['mean']:+.4f}  {interval}, {', '.join(tests)}")
    if not any("accuracy" in figures for figures in results["sets"].values()):
        print("no accuracy, pass@k or cons@k: nothing says which responses are correct (env.NAME.correct_func,")
        print("correct_from of a judge, correct_at of verifiers, or `correct` of an environment of your own)")
    print(f"wrote {request.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
