"""A rollout worker's client of an environment: a queue of calls to the environment processes of this worker."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from ray.exceptions import RayActorError, RayError

from megatron_grpo.batch.images import Images
from megatron_grpo.cluster.actor_calls import call_actor
from megatron_grpo.cluster.futures import build_overdue_error, explain_error, wrap_for_pickling
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.scores import (
    EncodedTurn,
    EnvironmentRequest,
    EnvironmentReturn,
    ModelAccess,
    ResponseFault,
    ScoreOrError,
)
from megatron_grpo.environments.environment_processes import EnvironmentHandle, kill_process
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import STARTUP_S, EnvironmentStatus
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.failures import AbandonedCall, ResponseFailure, RolloutFailure

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

SCORING_ATTEMPTS = 2  # calls for a prompt's samples
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PromptWork:
    """What an environment's processes do for the samples of one prompt."""

    calls: int = 0  # in progress
    seconds: float = 0.0  # of the calls that have ended, on the clock


PROMPT_WORK: ContextVar[PromptWork] = ContextVar("PROMPT_WORK")  # of the prompt whose samples the current task runs


@dataclass(slots=True, eq=False)
class _Call:
    """A call that is queued or waits for its answer."""

    method: Callable[..., Any]  # of `EnvironmentWorker`
    arguments: tuple[Any, ...]
    answer: asyncio.Future[Any]
    work: PromptWork = field(default_factory=lambda: PROMPT_WORK.get(PromptWork()))
    sent_at: float | None = None  # time on the clock; None: it is queued

    def settle(self, outcome: Any) -> None:
        """Set the result or exception, unless the call has ended."""
        if self.answer.done():
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class _Queue:
    """Calls that wait for a process.

    Next is a call of the prompt with the fewest calls in progress, and of these the one that has taken the least time:
    the slow rollouts of one prompt do not hold up those of the others, nor the scores of complete ones.
    """

    def __init__(self) -> None:
        self._calls: dict[PromptWork, deque[_Call]] = {}  # in the order in which the prompts came

    def append(self, call: _Call) -> None:
        self._calls.setdefault(call.work, deque()).append(call)

    def take(self) -> _Call | None:
        """Take the next call that somebody waits for."""
        while self._calls:
            work = min(self._calls, key=lambda work: (work.calls, work.seconds))
            call = self._calls[work].popleft()
            if not self._calls[work]:
                del self._calls[work]
            if not call.answer.done():  # otherwise its caller is cancelled
                work.calls += 1
                return call
        return None

    def __iter__(self) -> Iterator[_Call]:
        return (call for calls in self._calls.values() for call in calls)


class EnvironmentClient:
    """Client of an environment; free processes take queued calls, one at a time.

    When a process dies, misses the deadline, or works for a caller that waits no longer, it is replaced. Calls that may
    end a process again, because a call like them did, have at most half of the processes, so that calls of other
    rollouts find one. The samples of a prompt are always scored together, because rewards may depend on the other
    samples.
    """

    def __init__(self, handle: EnvironmentHandle, clock: RolloutClock) -> None:
        self.is_multi_turn = self.has_agent = False
        self.reads_token_ids = False
        self.remarks: list[str] = []  # replacements of processes and their reasons, for the log of the run
        self.leave_out_suspects, self.prompts = handle.config.leave_out_suspects, handle.settings.prompts
        self.images = handle.settings.images
        self._handle, self._clock = handle, clock
        self._queue = _Queue()
        self._suspects = _Queue()  # calls that repeat a failed one
        self._has_work = asyncio.Condition()  # a call was queued
        # The last calls that were answered, by method: they show whether the environment works at all.
        self._answered: dict[Callable[..., Any], tuple[Any, ...]] = {}
        self._agents = 0  # agents that ended well
        self._error: SamplingError | None = None  # set once a process could not be replaced
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait until every process is up; SamplingError if one fails."""
        actors = self._handle.actors
        statuses = await asyncio.gather(*map(self._wait_ready, actors))
        for number, (actor, status) in enumerate(zip(actors, statuses, strict=True)):
            self.is_multi_turn, self.has_agent = status.multi_turn, status.has_agent
            self.reads_token_ids = status.reads_token_ids
            # Suspects have half of the processes, and these take them first: neither kind waits for all of the other.
            queues = [self._suspects, self._queue] if number < len(actors) // 2 else [self._queue]
            if len(actors) == 1:
                queues.append(self._suspects)
            task = asyncio.create_task(self._serve(actor, status, queues))
            self._tasks.add(task)  # the loop itself holds tasks only weakly
            task.add_done_callback(self._tasks.discard)

    # is_repeated: an earlier attempt at the rollout failed over its response, perhaps an equal one.

    async def reset(
        self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], *, is_repeated: bool = False
    ) -> Any:
        """Return the first state of a rollout; None if single-turn."""
        if not self.is_multi_turn:
            return None
        try:
            call = self._call(EnvironmentWorker.reset, prompt, extra_env_info, is_suspect=is_repeated)
            return _require_answer(await call)
        except ResponseFailure as failure:  # there is no response yet
            raise RolloutFailure(str(failure)) from None

    async def step(
        self, state: Any, response: str, last_token: int, images: Images = (), *, is_repeated: bool = False
    ) -> EncodedTurn:
        """Return the turn after a response; the last one if single-turn.

        `images`: of the conversation so far.
        """
        if not self.is_multi_turn:
            return EncodedTurn()
        call = self._call(EnvironmentWorker.step, state, response, last_token, images, is_suspect=is_repeated)
        turn = _require_answer(await call)
        self._answered[EnvironmentWorker.step] = state, response, last_token, images
        return turn

    async def act(
        self,
        prompt: str | list[dict[str, str]],
        extra_env_info: dict[str, Any],
        access: ModelAccess,
        images: Images = (),
        *,
        is_repeated: bool = False,
    ) -> Any:
        """Run the agent in its own process; returns the state.

        `images`: of the prompt.
        """
        agents = self._agents
        try:
            call = self._call(EnvironmentWorker.act, prompt, extra_env_info, access, images, is_suspect=is_repeated)
            state = _require_answer(await call)
        except ResponseFailure as failure:
            failure.agents = agents
            raise
        self._agents += 1
        return state

    async def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
        """Return a score for each sample, or the reason why it has none."""
        last = RolloutFailure("")
        for attempt in range(SCORING_ATTEMPTS):
            try:
                scores = _require_answer(await self._call(EnvironmentWorker.score, requests, is_suspect=attempt > 0))
            except RolloutFailure as failure:
                if not attempt:
                    self.remarks.append(f"{failure}; the {len(requests)} responses are scored again, together")
                last = failure
            else:
                for score in scores:
                    if not isinstance(score, str):
                        score.retries += attempt
                        break
                self._answered[EnvironmentWorker.score] = (requests,)
                return scores
        if isinstance(last, ResponseFailure):
            return await self.score_apart(requests, str(last))
        return [str(last)] * len(requests)

    async def score_apart(self, requests: list[EnvironmentRequest], reason: str) -> list[ScoreOrError]:
        """Score a prompt's samples without those over which scoring fails.

        Each response is scored alone, only to see whether that fails: rewards may depend on the other responses, so the
        others are then scored together. Without such a response, or with no other, all get `reason`.
        """
        failed: list[ScoreOrError] = [reason] * len(requests)
        is_answering = await self._is_answering(EnvironmentWorker.score)
        if is_answering is False:
            return failed
        if len(requests) == 1:
            return [_make_fault(reason)] if is_answering else failed
        faults = await asyncio.gather(*(self._find_fault(request) for request in requests))
        remaining = [request for request, fault in zip(requests, faults, strict=True) if fault is None]
        if not 0 < len(remaining) < len(requests):
            return failed
        try:
            scores = iter(_require_answer(await self._call(EnvironmentWorker.score, remaining)))
        except RolloutFailure:
            return failed
        self.remarks.append(f"{reason}; {len(requests) - len(remaining)} of {len(requests)} responses are to blame")
        return [next(scores) if fault is None else _make_fault(fault) for fault in faults]

    async def _find_fault(self, request: EnvironmentRequest) -> str | None:
        """Score a response alone; returns the reason if that fails through it."""
        reason = None
        for _ in range(SCORING_ATTEMPTS):
            try:
                answer = await self._call(EnvironmentWorker.score, [request], is_suspect=True)
            except ResponseFailure as failure:  # its process was lost
                return str(failure)
            except RolloutFailure:
                return None
            if not isinstance(answer, ResponseFault):
                return None
            reason = answer.reason
        return reason

    async def is_working(self, failure: ResponseFailure) -> bool:
        """True if the environment works for other responses.

        An agent cannot be repeated without its model, so it counts that another one has ended well since.
        """
        if self.has_agent:
            return self._agents > failure.agents
        return bool(await self._is_answering(EnvironmentWorker.step))

    async def _is_answering(self, method: Callable[..., Any]) -> bool | None:
        """Repeat the last call that was answered; None: there is none."""
        if method not in self._answered:
            return None
        try:
            _require_answer(await self._call(method, *self._answered[method]))
        except RolloutFailure:
            return False
        return True

    async def _call(
        self,
        method: Callable[[EnvironmentWorker, *Arguments], Answer],
        *arguments: *Arguments,
        is_suspect: bool = False,
    ) -> Answer:
        """Queue a call; ResponseFailure if its process was lost.

        is_suspect: it may end its process, because a call for the same response, or an earlier attempt, has failed.
        """
        if self._error is not None:
            raise self._error
        call = _Call(method, arguments, asyncio.get_running_loop().create_future())
        (self._suspects if is_suspect else self._queue).append(call)
        async with self._has_work:
            self._has_work.notify_all()
        try:
            answer: Answer = await call.answer
        except asyncio.CancelledError as error:
            if call.sent_at is not None:
                error.args = (AbandonedCall(self._clock.time() - call.sent_at),)
            raise
        return answer

    async def _serve(self, actor: Any, status: EnvironmentStatus, queues: Sequence[_Queue]) -> None:
        call: _Call | None = None
        try:
            while True:
                async with self._has_work:
                    call = await self._has_work.wait_for(partial(_take_call, queues))
                assert call is not None
                reason = await self._run(actor, status.pid, call)
                if reason is not None:
                    kill_process(actor, status)
                    call.settle(ResponseFailure(reason))
                    actor = self._handle.spawn()
                    status = await self._wait_ready(actor)
        except Exception as error:  # noqa: BLE001 - nothing awaits this task: waiting callers get the error
            text = f"environment {self._handle.name}: {type(error).__name__}: {error}"
            sampling_error = error if isinstance(error, SamplingError) else SamplingError(text)
            self._error = sampling_error  # later calls fail, too
            for waiting in [*([] if call is None else [call]), *self._queue, *self._suspects]:
                waiting.settle(sampling_error)

    async def _run(self, actor: Any, pid: int, call: _Call) -> str | None:
        """Send a call to a process; returns why the process failed, or None."""
        # A message has one call: those behind a call that hangs or ends the process would be late or lost with it.
        name, timeout_s = self._handle.name, self._handle.config.timeout_s
        process_name = f"environment {name} worker {pid}"
        call.sent_at = self._clock.time()
        reply = asyncio.ensure_future(
            call_actor(actor, EnvironmentWorker.run, wrap_for_pickling((call.method, call.arguments)))
        )
        try:
            async with self._clock.timeout(timeout_s):  # an agent waits for engines that sleep
                await asyncio.wait([reply, call.answer], return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                self.remarks.append(
                    f"{process_name} worked for a rollout that is over; another process takes its place"
                )
                return f"environment {name}: the call was given up"
            call.settle(reply.result())
        except TimeoutError:
            error_text = await asyncio.to_thread(build_overdue_error, "scoring", [process_name], timeout_s)
            logger.warning("%s", error_text)
            self.remarks.append(f"{error_text}; another process takes its place")
            return f"environment {name}: no answer within env.{name}.timeout_s={timeout_s:g} s"
        except RayActorError:
            self.remarks.append(f"{process_name} ended; another process takes its place")
            return f"environment {name}: its process ended over this response"
        except RayError as error:  # for example an answer that cannot be pickled, or a lack of memory
            return f"environment {name}: its process {explain_error(error)}"
        finally:
            reply.cancel()
            call.work.calls -= 1
            call.work.seconds += self._clock.time() - call.sent_at
        return None

    async def _wait_ready(self, actor: Any) -> EnvironmentStatus:
        name = self._handle.name
        try:
            async with asyncio.timeout(STARTUP_S):
                return await call_actor(actor, EnvironmentWorker.start)
        except TimeoutError:
            raise SamplingError(f"environment {name}: a process did not start within {STARTUP_S:g} s") from None
        except RayError as error:
            raise SamplingError(f"environment {name}: a process {explain_error(error)} as it started") from error


def _take_call(queues: Sequence[_Queue]) -> _Call | None:
    return next((call for queue in queues if (call := queue.take()) is not None), None)


def _require_answer(answer: Answer | ResponseFault | str) -> Answer:
    if isinstance(answer, ResponseFault):
        raise ResponseFailure(answer.reason)
    if isinstance(answer, str):  # the reason why there is none
        raise RolloutFailure(answer)
    return answer


def _make_fault(reason: str) -> EnvironmentReturn:
    return EnvironmentReturn(reward=0.0, correct=None, fault=reason)
