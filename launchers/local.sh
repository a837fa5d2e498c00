#!/usr/bin/env bash
# One training run on this machine, with its output also in a file: launchers/local.sh +exp=qwen3_8b_8gpu KEY=VALUE ...
#
# Environment: PYTHON (interpreter; .venv/bin/python when there is one, else python3), RUN_DIR (run directory; given again,
# the run resumes). The run ends with the terminal's Ctrl-C; to outlive the terminal: nohup launchers/local.sh ... &
set -euo pipefail

python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
run_dir=${RUN_DIR:-outputs/local-$(date +%Y-%m-%d_%H-%M-%S)}
# shellcheck disable=SC2174 # folders around it are as the user has them
mkdir -p -m 700 "$run_dir"
# tee ignores Ctrl-C, so that what the run says while it shuts down still arrives.
"$python" -P -m megatron_grpo.train run_dir="$run_dir" "$@" 2>&1 | (trap '' INT && exec tee -a "$run_dir/output.log")
