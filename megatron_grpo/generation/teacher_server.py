"""A teacher on an OpenAI-compatible vLLM server: its likeliest tokens at the tokens of a step."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.special_tokens import list_added_tokens
from megatron_grpo.batch.step_batch import TokenArrays
from megatron_grpo.batch.token_batch import find_token_indices
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import read_token
from megatron_grpo.config.secret_values import read_secret
from megatron_grpo.data.tokenizer import encode_text, load_tokenizer, make_sample_texts, quote_difference
from megatron_grpo.generation.server import CONNECT_S, ERROR_CHARACTERS

IN_FLIGHT = 64  # requests of a step that a server has at once
# A teacher's probabilities are float32 numbers, whose sum says nothing about a smaller rest.
LEAST_TAIL = 1e-7


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """A server with a teacher."""

    key: str  # of the configuration, for messages
    url: str
    top_k: int
    timeout_s: float  # of the requests of a step, all together
    policy_folder: str  # whose tokenizer the server must have
    api_key_variable: str | None = None  # environment variable with its API key; None: that of the run's token

    @property
    def address(self) -> str:
        """Key and value, for messages."""
        return f"{self.key}={self.url}"


def fetch_teacher_outputs(
    lengths: NDArray[np.int64], arrays: TokenArrays, sequences: NDArray[np.int64], server: TeacherServer, vocab: int
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    """Fetch a teacher's likeliest tokens at the sampled tokens of `sequences`.

    Returns `teacher_outputs` (`TokenFields`) of all tokens, 0 where none was fetched; and [sequences], bool: True where
    they are finite. RunError: the server fails, or does not give that many tokens.
    """
    return asyncio.run(_fetch(lengths, arrays, sequences, server, vocab))


async def _fetch(
    lengths: NDArray[np.int64], arrays: TokenArrays, sequences: NDArray[np.int64], server: TeacherServer, vocab: int
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    outputs = np.zeros((int(lengths.sum()), 2 * server.top_k + 1), dtype=np.float32)
    is_finite = np.ones(len(lengths), dtype=np.bool_)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def fetch_sequence(session: aiohttp.ClientSession, sequence: int) -> None:
        tokens = find_token_indices(lengths, np.array([sequence]))
        async with slots:
            rows = await _fetch_sequence(session, server, arrays["token_ids"][tokens].tolist())
        for index in np.flatnonzero(arrays["sampled"][tokens]).tolist():
            outputs[tokens[index]] = pack_row(rows[index], server, vocab)
        is_finite[sequence] = bool(np.isfinite(outputs[tokens]).all())

    try:
        async with asyncio.timeout(server.timeout_s), _open_session(server) as session:
            await asyncio.gather(*(fetch_sequence(session, sequence) for sequence in sequences.tolist()))
    except TimeoutError:
        raise RunError(f"{server.address} did not score the step within {server.timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RunError(f"{server.address}: {error}") from error
    return {"teacher_outputs": outputs}, is_finite


def _open_session(server: TeacherServer) -> aiohttp.ClientSession:
    name = server.api_key_variable
    token = read_token() if name is None else read_secret(name, server.key.replace("server_url", "api_key_variable"))
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
    )


async def _fetch_sequence(session: aiohttp.ClientSession, server: TeacherServer, tokens: list[int]) -> list[Any]:
    """Fetch the likeliest tokens at each token; None at the first."""
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": server.top_k}
    answer = await _post(session, server, "/v1/completions", body)
    rows: list[Any] = answer["choices"][0]["prompt_logprobs"]
    return rows


async def _post(session: aiohttp.ClientSession, server: TeacherServer, path: str, body: Any) -> Any:
    async with session.post(server.url.rstrip("/") + path, json=body) as answer:
        if answer.status >= 400:
            text = (await answer.text())[:ERROR_CHARACTERS]
            raise RunError(f"{server.address}{path} answers {answer.status}: {text}")
        return await answer.json()


def pack_row(row: dict[str, dict[str, Any]], server: TeacherServer, vocab: int) -> NDArray[np.float32]:
    """Pack the k likeliest tokens of one position: [2 k + 1], float32."""
    # Beside the k likeliest ones, the server gives the token that follows.
    likeliest = sorted(row.items(), key=lambda pair: pair[1]["rank"])[: server.top_k]
    if len(likeliest) < server.top_k:
        text = f"gives {len(likeliest)} tokens, not distillation.topk_logits_k={server.top_k}"
        raise RunError(f"{server.address} {text}; start it with --max-logprobs={server.top_k}")
    token_ids = [int(token) for token, _ in likeliest]
    if max(token_ids) >= vocab:
        raise RunError(f"{server.address} gives token {max(token_ids)}, and the policy has {vocab}")
    logprobs = [float(entry["logprob"]) for _, entry in likeliest]
    tail = math.log(max(1.0 - math.fsum(map(math.exp, logprobs)), LEAST_TAIL))
    return np.array([*token_ids, *logprobs, tail], dtype=np.float32)


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
                served = (await _post(session, server, "/tokenize", body))["tokens"]
                if served != ids:
                    difference = quote_difference(served, ids)
                    text = f"has another tokenizer than policy.model.path={server.policy_folder}: {text!r} gives"
                    raise RunError(f"{server.address} {text} {difference}; distill from a teacher with it")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise RunError(f"no vLLM server answers at {server.address}: {reason}") from error
