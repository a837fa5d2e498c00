"""The state of a run, from the files in its folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, read_heartbeats
from megatron_grpo.cluster.process_log import DRIVER, LOGS_FOLDER
from megatron_grpo.config.outside_files import read_json
from megatron_grpo.observability.run_files import SUMMARY_FILE, read_metrics
from megatron_grpo.run.directory import ALIVE_S, CONFIG_FILE, STOP_FILE, is_alive, read_config_file


def describe_run(run_dir: Path) -> Iterator[str]:
    """Describe the steps, the processes and the end of a run, a line each."""
    steps = read_metrics(run_dir)
    if steps:
        seconds = [step["timing"]["total"] for step in steps[-10:]]
        recently = f"{sum(seconds) / len(seconds):.1f} s each lately"
        yield f"step {steps[-1]['step']}{_describe_limit(run_dir)}, {recently}"
    elif (run_dir / CONFIG_FILE).exists():
        yield "no step yet"
    else:
        yield "the run has not begun"
    if is_alive(run_dir):
        yield _describe_processes(run_dir)
    elif (run_dir / SUMMARY_FILE).exists():
        summary = read_json(run_dir / SUMMARY_FILE)
        reason = f": {summary['reason']}" if summary.get("reason") else ""
        yield f"ended: {summary.get('outcome')}{reason}"
    elif steps:
        yield "the driver is not alive, and has written no summary: it was killed"


def _describe_limit(run_dir: Path) -> str:
    """Say how many steps the run is to have."""
    try:
        values = read_config_file(run_dir / CONFIG_FILE)
    except (FileNotFoundError, ValueError):
        return ""
    limits = [
        section["max_num_steps"]
        for section in values.values()
        if isinstance(section, dict) and "max_num_steps" in section
    ]
    return f" of {limits[0]}" if limits else ""


def _describe_processes(run_dir: Path) -> str:
    """Say how many processes are alive, and which are silent."""
    heartbeats = read_heartbeats(run_dir / LOGS_FOLDER / HEARTBEATS_FOLDER)
    silent = sorted(name for name, heartbeat in heartbeats.items() if time.time() - heartbeat.beat > ALIVE_S)
    phases = heartbeats[DRIVER].phases
    text = f"processes alive: {len(heartbeats) - len(silent)}"
    text += f"; the driver: {phases[0].name}" if phases else ""
    text += f"; silent: {', '.join(silent)}" if silent else ""
    return text + ("; it will end after this step" if (run_dir / STOP_FILE).exists() else "")
