"""A server of megatron_grpo.serve in a process of its own, as a user starts one."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.platform.device import environment

START_S = 400.0


class ServerProcess:
    """Can be killed and started again at its address."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self._model, self._log, self._arguments = model, log, arguments
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "megatron_grpo.serve", str(self._model), f"--port={self.port}"]
        command += ["--dtype=float32", "--max-model-len=64", "--max-num-seqs=32", "--enforce-eager"]
        command += [f"--kv-cache-memory-bytes={10**8}", *self._arguments]
        variables = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )

    def wait_until_up(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self._process.poll() is None, self.log()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.3)
        raise AssertionError(self.log()[-3000:])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """All of its processes at once, as a machine that goes down."""
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            for process in [*server.children(recursive=True), server]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self._process.wait(10)


@contextmanager
def serving(model: Path, log: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server that answers; its token is in the environment of the body."""
    with environment(**{TOKEN_VARIABLE: secrets.token_hex()}):
        server = ServerProcess(model, log, *arguments)
        server.start()
        try:
            server.wait_until_up()
            yield server
        finally:
            server.kill()
