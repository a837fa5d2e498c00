"""A teacher on an OpenAI-compatible vLLM server: its likeliest tokens at the tokens of a step."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.special_tokens import list_added_tokens
from megatron_grpo.batch.step_batch import TokenArrays
from megatron_grpo.batch.token_batch import find_token_indices
from megatron_grpo.config.errors import RunError, to_text
from megatron_grpo.config.secret_values import make_authorization
from megatron_grpo.data.tokenizer import encode_text, load_tokenizer, make_sample_texts, quote_difference
from megatron_grpo.generation.server import CONNECT_S, ROUNDING, read_answer

IN_FLIGHT = 64  # requests of a step that a server has at once
# float32 probabilities cannot tell a smaller tail from rounding.
LEAST_TAIL = 1e-7
_BYTES_PER_ENTRY = 1024  # of an answer, at most; a token with its text takes about a hundred
_MORE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """A server with a teacher."""

    key: str  # of the configuration, for messages
    url: str
    top_k: int
    timeout_s: float  # of the requests of a step, all together
    policy_folder: str  # whose tokenizer the server must have
    api_key_variable: str | None = None  # environment variable with its API key; None: it needs none

    @property
    def address(self) -> str:
        """Key and value, for messages."""
        return f"{self.key}={self.url}"


def fetch_teacher_outputs(
    lengths: NDArray[np.int64], arrays: TokenArrays, sequences: NDArray[np.int64], server: TeacherServer, vocab: int
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    """Fetch a teacher's likeliest tokens at the sampled tokens of `sequences`.

    Returns `teacher_outputs` (`TokenFields`) of all tokens, 0 where none was fetched; and [sequences], bool: True, as
    they are finite. RunError: the server fails, or gives what cannot be the tokens' log-probabilities.
    """
    return asyncio.run(_fetch(lengths, arrays, sequences, server, vocab))


async def _fetch(
    lengths: NDArray[np.int64], arrays: TokenArrays, sequences: NDArray[np.int64], server: TeacherServer, vocab: int
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    outputs = np.zeros((int(lengths.sum()), 2 * server.top_k + 1), dtype=np.float32)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def fetch_sequence(session: aiohttp.ClientSession, sequence: int) -> None:
        tokens = find_token_indices(lengths, np.array([sequence]))
        async with slots:
            rows = await _fetch_sequence(session, server, arrays["token_ids"][tokens].tolist())
        for index in np.flatnonzero(arrays["sampled"][tokens]).tolist():
            outputs[tokens[index]] = pack_row(rows[index], server, vocab)

    try:
        async with asyncio.timeout(server.timeout_s), _open_session(server) as session:
            await asyncio.gather(*(fetch_sequence(session, sequence) for sequence in sequences.tolist()))
    except TimeoutError:
        raise RunError(f"{server.address} did not score the step within {server.timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RunError(f"{server.address}: {error}") from error
    return {"teacher_outputs": outputs}, np.ones(len(lengths), dtype=np.bool_)


def _open_session(server: TeacherServer) -> aiohttp.ClientSession:
    name = server.api_key_variable
    key = server.key.replace("server_url", "api_key_variable")
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers={} if name is None else make_authorization(name, key),
    )


async def _fetch_sequence(session: aiohttp.ClientSession, server: TeacherServer, tokens: list[int]) -> list[Any]:
    """Fetch the likeliest tokens at each token; None at the first."""
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": server.top_k}
    answer = await _post(session, server, "/v1/completions", body, entries=len(tokens) * (server.top_k + 1))
    try:
        (choice,) = answer["choices"]
        rows = choice["prompt_logprobs"]
    except (KeyError, TypeError, ValueError):
        rows = None
    if not isinstance(rows, list):
        raise RunError(f"{server.address} gives no prompt_logprobs, but {to_text(answer)}")
    if len(rows) != len(tokens):
        raise RunError(f"{server.address} gives log-probabilities of {len(rows)} tokens, not of the {len(tokens)} sent")
    for index, (token, row) in enumerate(zip(tokens[1:], rows[1:], strict=True), start=1):
        # Beside the likeliest tokens, a row always has the one that stands there.
        if not isinstance(row, dict) or str(token) not in row:
            text = f"gives token {index} of {len(tokens)}, {token}, no log-probability: its rows belong to other tokens"
            raise RunError(f"{server.address} {text}, or it is no vLLM server")
    return rows


async def _post(session: aiohttp.ClientSession, server: TeacherServer, path: str, body: Any, entries: int = 0) -> Any:
    """Post a request; returns the JSON of an answer with so many log-probabilities."""
    limit, url = _MORE_BYTES + entries * _BYTES_PER_ENTRY, server.url.rstrip("/") + path
    # A redirection would get the tokens, and could be to anybody.
    async with session.post(url, json=body, allow_redirects=False) as answer:
        return await read_answer(answer, limit, f"{server.address}{path}", server.key)


def pack_row(row: dict[str, dict[str, Any]], server: TeacherServer, vocab: int) -> NDArray[np.float32]:
    """Pack the k likeliest tokens of one position: [2 k + 1], float32."""
    entries = _read_row(row, server, vocab)
    # Beside the k likeliest ones, the server gives the token that follows.
    likeliest = sorted(entries)[: server.top_k]
    if len(likeliest) < server.top_k:
        text = f"gives {len(likeliest)} tokens, not distillation.topk_logits_k={server.top_k}"
        raise RunError(f"{server.address} {text}; start it with --max-logprobs={server.top_k}")
    ranks, token_ids, logprobs = zip(*likeliest, strict=True)
    total, total_of_all = math.fsum(map(math.exp, logprobs)), math.fsum(math.exp(logprob) for *_, logprob in entries)
    reason = None
    # Equally likely tokens may have one rank.
    if not all(1 <= rank <= position for position, rank in enumerate(ranks, start=1)):
        reason = f"the ranks {', '.join(map(str, ranks))}, not 1 to {server.top_k}"
    elif any(later > earlier + ROUNDING for earlier, later in pairwise(logprobs)):
        reason = "a likelier token behind a less likely one"
    elif total_of_all > 1 + ROUNDING:
        reason = f"probabilities that add up to {total_of_all:g}"
    elif total < server.top_k / (2 * vocab):  # the likeliest tokens have at least their share
        reason = f"likeliest tokens with a probability of {total:g} together"
    if reason is not None:
        raise RunError(f"{server.address} gives {reason}: {to_text(row)}")
    tail = math.log(max(1.0 - total, LEAST_TAIL))
    return np.array([*token_ids, *logprobs, tail], dtype=np.float32)


def _read_row(row: dict[str, dict[str, Any]], server: TeacherServer, vocab: int) -> list[tuple[int, int, float]]:
    """Read rank, token and log-probability of each token of a row."""
    entries: list[tuple[int, int, float]] = []
    for token, entry in row.items():
        reason = None
        rank: Any
        logprob: Any
        rank, logprob = (entry.get("rank"), entry.get("logprob")) if isinstance(entry, dict) else (None, None)
        if not (token.isascii() and token.isdecimal() and str(int(token)) == token):
            reason = f"token {to_text(token)!r}, which is no id"
        elif int(token) >= vocab:
            reason = f"token {token}, and the policy has {vocab}"
        elif type(rank) is not int:
            reason = f"token {token} the rank {to_text(rank)}, which is no whole number"
        elif type(logprob) not in (int, float) or not logprob <= ROUNDING:
            reason = f"token {token} the log-probability {to_text(logprob)}, which is impossible"
        if reason is not None:
            raise RunError(f"{server.address} gives {reason}")
        entries.append((rank, int(token), min(float(logprob), 0.0)))
    return entries


def require_same_tokenizer(server: TeacherServer) -> None:
    """Check that a server answers and has the policy's tokenizer; RunError if not."""
    asyncio.run(_require_same_tokenizer(server))


async def _require_same_tokenizer(server: TeacherServer) -> None:
    tokenizer = load_tokenizer(server.policy_folder)
    try:
        async with asyncio.timeout(server.timeout_s), _open_session(server) as session:
            for text in make_sample_texts(list_added_tokens(tokenizer)):
                ids = encode_text(tokenizer, text)
                if ids is None:  # it has no tokens for this text
                    continue
                body = {"prompt": text, "add_special_tokens": False}
                answer = await _post(session, server, "/tokenize", body)
                served = answer.get("tokens") if isinstance(answer, dict) else None
                if not isinstance(served, list):
                    raise RunError(f"{server.address}/tokenize gives no tokens, but {to_text(answer)}")
                if served != ids:
                    difference = quote_difference(served, ids)
                    text = f"has another tokenizer than policy.model.path={server.policy_folder}: {text!r} gives"
                    raise RunError(f"{server.address} {text} {difference}; distill from a teacher with it")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise RunError(f"no vLLM server answers at {server.address}: {reason}") from error
