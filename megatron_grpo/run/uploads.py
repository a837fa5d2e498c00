"""Complete checkpoints on their way to other storage and to the hub, while training goes on."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_grpo.config.errors import RunError, select_first_line
from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.run.checkpoint_files import MANIFEST_FILE

logger = logging.getLogger(__name__)
_EXPORT_FOLDER = ".model_for_the_hub"  # in the run's folder, while the hub gets it


def explain_unusable_storage(url: str) -> str | None:
    """Explain why fsspec cannot use a URL here, without a connection; None: it can."""
    import fsspec  # here and below: most runs send nothing

    protocol = fsspec.utils.get_protocol(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        return f"{protocol}:// is no storage that fsspec knows; give a URL such as s3://BUCKET/RUN"
    except ImportError as error:
        return f"needs a package that is not installed here: {select_first_line(error)}"
    return None


def upload_folder(folder: Path, url: str) -> None:
    """Copy a checkpoint to URL/NAME, its manifest last.

    Until the manifest is there, a start refuses the copy as incomplete. Raises what the storage's package raises.
    """
    import fsspec

    storage, root = fsspec.url_to_fs(url)
    target = f"{root}/{folder.name}"
    storage.makedirs(target, exist_ok=True)
    # A copy of an earlier try would otherwise count as complete while its files are replaced.
    if storage.exists(f"{target}/{MANIFEST_FILE}"):
        storage.rm_file(f"{target}/{MANIFEST_FILE}")
    for inner in sorted(path for path in folder.rglob("*") if path.is_dir()):
        storage.makedirs(f"{target}/{inner.relative_to(folder).as_posix()}", exist_ok=True)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    names.remove(MANIFEST_FILE)
    storage.put([str(folder / name) for name in names], [f"{target}/{name}" for name in names])
    storage.put_file(str(folder / MANIFEST_FILE), f"{target}/{MANIFEST_FILE}")


class CheckpointUploads:
    """Sends complete checkpoints, one at a time, in a thread.

    While one is sent, only the newest of the later ones waits. Notes are given to `note` by `report`, in the caller's
    thread.
    """

    def __init__(self, config: CheckpointingConfig, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self.note: Callable[[str], None] = lambda text: None
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._sending: tuple[Path, float] | None = None  # and time.monotonic() when it began
        self._notes: list[str] = []
        self._unsent: dict[Path, str] = {}  # why the newest checkpoint that was given is not there
        self._is_overdue_noted = False

    def add(self, folder: Path) -> None:
        """Send a complete checkpoint, after the one before."""
        if self._config.upload_to is None and self._config.push_to_hub is None:
            return
        with self._changed:
            if self._waiting is not None:
                self._notes.append(f"{self._waiting} was not sent: {folder} came before its turn")
            self._waiting, self._unsent = folder, {folder: "it was not sent in time"}
            if self._sending is None:
                self._sending = folder, time.monotonic()
                threading.Thread(target=self._send_all, name="checkpoint-uploads", daemon=True).start()

    def holds(self, folder: Path) -> bool:
        """True while a checkpoint is being sent, or waits."""
        with self._changed:
            return folder == self._waiting or (self._sending is not None and folder == self._sending[0])

    def report(self) -> None:
        """Give notes about what was sent, and what is late."""
        with self._changed:
            notes, self._notes = self._notes, []
            if self._sending is not None and not self._is_overdue_noted and self._get_remaining_s() <= 0:
                self._is_overdue_noted = True
                limit = f"checkpointing.upload_timeout_s={self._config.upload_timeout_s:g}"
                notes.append(f"sending {self._sending[0]} takes longer than {limit}; training goes on")
        for note in notes:
            self.note(note)

    def finish(self) -> None:
        """Wait until the newest checkpoint is sent.

        Raises RunError if it could not be, or its deadline passes; it is still in the run's folder.
        """
        with self._changed:
            if self._sending is not None or self._waiting is not None:
                logger.info("waiting for the last checkpoint to be sent")
            while self._sending is not None:
                remaining_s = self._get_remaining_s()
                if remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
        self.report()
        for folder, reason in self._unsent.items():
            where = self._config.upload_to or self._config.push_to_hub
            raise RunError(f"{folder} is complete, but is not at {where}: {reason}")

    def _get_remaining_s(self) -> float:
        assert self._sending is not None
        return self._sending[1] + self._config.upload_timeout_s - time.monotonic()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._sending = None
                    self._changed.notify_all()
                    return
                folder, self._waiting = self._waiting, None
                self._sending, self._is_overdue_noted = (folder, time.monotonic()), False
            began = time.monotonic()
            try:
                self._send(folder)
            except Exception as error:  # each storage's package has errors of its own
                reason = select_first_line(error) or type(error).__name__
                logger.warning("%s could not be sent", folder, exc_info=error)
                note = f"{folder} could not be sent: {reason}"
            else:
                reason, note = "", f"sent {folder} in {time.monotonic() - began:.1f} s"
            with self._changed:
                self._notes.append(note)
                if folder in self._unsent and reason:
                    self._unsent[folder] = reason
                elif folder in self._unsent:
                    del self._unsent[folder]

    def _send(self, folder: Path) -> None:
        if self._config.upload_to is not None:
            upload_folder(folder, self._config.upload_to)
        if self._config.push_to_hub is not None:
            self._push_model(folder, self._config.push_to_hub)

    def _push_model(self, folder: Path, name: str) -> None:
        """Export the model, and send it to the hub."""
        output = self._run_dir / _EXPORT_FOLDER
        shutil.rmtree(output, ignore_errors=True)
        # A process of its own: an export holds a whole model, and the driver's memory is that of the run.
        command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={folder}", f"output={output}"]
        try:
            subprocess.run(
                [*command, f"push_to_hub={name}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=True,
                timeout=self._config.upload_timeout_s,
            )
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()]
            raise RunError(lines[-1].strip() if lines else f"the export ended with {error.returncode}") from None
        finally:
            shutil.rmtree(output, ignore_errors=True)
