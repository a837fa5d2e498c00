"""Runs functions on texts of models and agents in processes that are killed at a limit of time or memory."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import LifoQueue
from typing import Any, TypeVar, TypeVarTuple

from megatron_grpo.config.errors import RunError

logger = logging.getLogger(__name__)
Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

STARTUP_S = 300.0  # deadline for making the state: vLLM's parsers take 10 s of a CPU to import
QUICK_S = 0.05  # processor time in which nearly every call is done
WALL_FACTOR = 30.0  # a process on a busy machine may wait so many times longer than it computes
LARGEST_REPLY = 2**28  # bytes
TEXT_BYTES = 2**30  # of memory that one text of a model may take while it is rendered


class LimitError(Exception):
    """A call needed more time or memory than it may take."""


class LimitedCalls:
    """Processes that run functions with limits.

    A first process makes the state (tokenizers, parsers), and forks those that run calls, which inherit it: a killed
    one is replaced within milliseconds. The limit is processor time, so the machine's load decides nothing; the system
    ends the process, also inside of C code that no exception interrupts. A call takes about 0.2 ms longer than here.
    """

    def __init__(
        self, make_state: Callable[[], Any], *, cpu_s: float, memory_mib: int = 1024, processes: int = 1
    ) -> None:
        """Start; RunError or the error of `make_state` if that fails.

        Args:
            make_state: called in the first process; functions get its result as their first argument.
            cpu_s: most processor time of a call, in seconds.
            memory_mib: most memory that a process may take beyond the state.
            processes: most calls at the same time.
        """
        from ray import cloudpickle  # imported here: the processes themselves need no Ray

        self._setup = cloudpickle.dumps((make_state, memory_mib * 2**20))
        self._cpu_s, self._limits = cpu_s, f"{cpu_s:g} s of a processor or {memory_mib} MiB"
        self._idle: LifoQueue[Connection | None] = LifoQueue()  # None: to be forked
        for _ in range(processes):
            self._idle.put(None)
        # `run` tries every call briefly before it gives it the whole time, on other threads, so that many calls without
        # end do not hold up the ordinary ones.
        self._quick_threads = ThreadPoolExecutor(max(processes // 2, 1), "quick calls")
        self._slow_threads = ThreadPoolExecutor(max(processes // 2, 1), "slow calls")
        self._fork_lock = threading.Lock()
        self._start()

    async def run(self, function: Callable[[Any, *Arguments], Answer], *arguments: *Arguments) -> Answer:
        """Call `function` with the state and arguments; LimitError beyond a limit."""
        loop, quick_s = asyncio.get_running_loop(), min(QUICK_S, self._cpu_s)
        try:
            return await loop.run_in_executor(self._quick_threads, self._call, quick_s, function, arguments)
        except LimitError:
            return await loop.run_in_executor(self._slow_threads, self._call, self._cpu_s, function, arguments)

    def call(self, function: Callable[[Any, *Arguments], Answer], *arguments: *Arguments) -> Answer:
        """Call as `run`, and wait."""
        return self._call(self._cpu_s, function, arguments)

    def _call(self, seconds: float, function: Callable[..., Answer], arguments: tuple[Any, ...]) -> Answer:
        message = pickle.dumps((seconds, function, arguments))
        connection = self._idle.get()
        try:
            if connection is not None and connection.poll():  # it ended while it was idle
                connection.close()
                connection = None
            connection = self._spawn() if connection is None else connection
            try:
                connection.send_bytes(message)
                if not connection.poll(WALL_FACTOR * max(seconds, 1.0)):
                    raise EOFError
                is_answer, reply = pickle.loads(connection.recv_bytes(LARGEST_REPLY))
            except (EOFError, OSError):
                connection.close()
                connection = None
                logger.debug("a call needed more than %g s of a processor, or its memory; its process ended", seconds)
                raise LimitError(f"needs more than {self._limits}") from None
        finally:
            self._idle.put(connection)
        if not is_answer:
            raise LimitError(f"needs more than {self._limits}") if isinstance(reply, MemoryError) else reply
        return reply

    def _spawn(self) -> Connection:
        with self._fork_lock:
            for attempt in range(2):
                ours, theirs = socket.socketpair()
                try:
                    with theirs:
                        send_handle(self._control, theirs.fileno(), self._process.pid)
                    return Connection(ours.detach())
                except OSError:  # the first process has ended
                    ours.close()
                    if attempt:
                        raise
                    self._end()
                    self._start()
        raise AssertionError

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # -P as in all of the run's processes: a file in the working folder hides no module.
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, start_new_session=True)
        self._control = Connection(ours.detach())
        logger.info("process %d begins; its calls may take %s", self._process.pid, self._limits)
        self._end = weakref.finalize(self, _end, self._process, self._control)
        try:
            self._control.send_bytes(self._setup)
            error = pickle.loads(self._control.recv_bytes()) if self._control.poll(STARTUP_S) else None
        except (EOFError, OSError):
            error = None
        if error is not True:
            self._end()
            raise error or RunError(f"the process that reads texts did not start within {STARTUP_S:g} s")

    def close(self) -> None:
        """End the processes; idempotent."""
        self._end()
        self._quick_threads.shutdown(wait=False)
        self._slow_threads.shutdown(wait=False)


def _end(process: subprocess.Popen[bytes], control: Connection) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and all that it forked
    process.wait()
    control.close()


def main() -> None:
    """Make the state, and fork a process for every connection from standard input."""
    control = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    try:
        make_state, memory = pickle.loads(control.recv_bytes())
        state = make_state()
    except Exception as error:  # noqa: BLE001 - the caller raises it
        control.send_bytes(_write(error))
        return
    control.send_bytes(pickle.dumps(True))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        try:
            handle = recv_handle(control)
        except (EOFError, OSError):  # the caller has ended
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            _serve(Connection(handle), state, memory)
            os._exit(0)
        os.close(handle)


def _serve(connection: Connection, state: Any, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process
    with limit_memory(memory):
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                return
            seconds, function, arguments = pickle.loads(message)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                reply = pickle.dumps((True, function(state, *arguments)))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                reply = pickle.dumps((False, pickle.loads(_write(error))))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(reply)


@contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """Let this process take `size` further bytes; MemoryError beyond.

    The limit is one of addresses, so a library that reserves more of them, as another thread's first use of a GPU, does
    not belong into the body.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (min(bound for bound in (limit, soft, hard) if bound >= 0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _write(error: Exception) -> bytes:
    """Pickle an error; one that cannot be pickled becomes a RunError."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)  # errors with other arguments than their message fail here
    except Exception:  # noqa: BLE001
        return pickle.dumps(RunError(f"{type(error).__name__}: {error}"))
    return text
