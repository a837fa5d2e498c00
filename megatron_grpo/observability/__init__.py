"""Reports of a run: times, metrics, trackers, plots, progress, summary, report page."""

from megatron_grpo.batch.rollout_files import read_rollouts as read_rollouts
