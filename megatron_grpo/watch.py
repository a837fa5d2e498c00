"""Follows runs while they go on: python -m megatron_grpo.watch RUN_DIR [OTHER_RUN_DIR ...]"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, build_file_stem
from megatron_grpo.cluster.process_log import DRIVER, LOGS_FOLDER
from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.observability.live.followed_run import FollowedRun
from megatron_grpo.observability.live.lanes import RUNNING_S
from megatron_grpo.observability.live.page_server import PageServer
from megatron_grpo.observability.live.screen import show_screen
from megatron_grpo.observability.run_files import read_lines
from megatron_grpo.run.directory import CONFIG_FILE, LAUNCH_FOLDER, RECORD_FILE, is_in_use

MOST_RUNS = 4
LOOK_S = 1.0
USAGE = """\
python -m megatron_grpo.watch RUN_DIR [OTHER_RUN_DIR ...] [port=N] [--text]

Serves the page of one run, or of up to four side by side, at an address that it prints: curves, lanes of all processes,
trajectories, alarms. New steps come in by themselves. It reads the files of the run, and asks nothing of its processes:
it works while the run goes on and after it, on any machine that sees the folder.

  port    port on this machine alone, 127.0.0.1; without it a free one. From elsewhere: ssh -L N:127.0.0.1:N HOST
  --text  no page: one screen in the terminal, drawn again until the runs have ended
"""


@as_command("watch", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Follow the runs until Ctrl-C; return the exit code."""
    parsed = parse_arguments(arguments, {"port": int, "--text": bool}, most_words=MOST_RUNS)
    if not parsed.words:
        raise ValueError("give the folder of a run, or of several; --help shows the arguments")
    port = parsed.options.get("port", 0)
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} is no port: use 1024 to 65535, or leave it out")
    folders = [Path(os.path.expanduser(word)) for word in parsed.words]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the run_dir of a run, such as outputs/quickstart/latest")
        _await_beginning(folder)
    runs = [FollowedRun(folder, is_going_on) for folder in folders]
    if parsed.options.get("text"):
        show_screen(runs)
        return 0
    asyncio.run(_serve(PageServer(runs, secrets.token_urlsafe(24)), port))
    return 0


def _await_beginning(folder: Path) -> None:
    """Wait for the first file of a launched run, without a deadline."""
    # A job may wait in a queue for days, and Ctrl-C ends this command alone.
    record = folder / LAUNCH_FOLDER / RECORD_FILE
    if (folder / CONFIG_FILE).exists() or not record.exists():
        return
    if seeds := read_lines(record)[-1].get("seeds"):
        raise ValueError(f"{folder} has a run for each seed: give {folder}/seed_{seeds[0]}, or several")
    text = f"{folder} was launched and has not begun: waiting for it"
    print(f"{text} (python -m megatron_grpo.launch status {folder} says where its job is)", file=sys.stderr, flush=True)
    while not (folder / CONFIG_FILE).exists():
        time.sleep(LOOK_S)


def is_going_on(folder: Path) -> bool:
    """True if a run's driver holds its lock or has a fresh heartbeat.

    Some shared file systems keep locks to one machine.
    """
    heartbeat = folder / LOGS_FOLDER / HEARTBEATS_FOLDER / f"{build_file_stem(DRIVER)}.json"
    try:
        age_s = time.time() - heartbeat.stat().st_mtime
    except OSError:
        age_s = float("inf")
    return is_in_use(str(folder)) or (age_s < RUNNING_S and not (folder / "summary.json").exists())


async def _serve(server: PageServer, port: int) -> None:
    try:
        await server.start(port)
    except OSError as error:
        raise ValueError(f"port={port} cannot be used: {error.strerror}; leave it out for a free one") from None
    print(f"{server.address}\nCtrl-C ends the page, not the run", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
