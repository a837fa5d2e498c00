"""Checks of servers that run elsewhere and of the endpoint for agents: addresses, and who may reach them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.cluster.addresses import TOKEN_VARIABLE, is_loopback, token, url_problem
from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.generation_schema import EndpointConfig
from megatron_grpo.config.schema import Config


def server_problems(config: Config) -> Iterator[Problem]:
    """What stands against generation.server.urls and generation.endpoint. Whether servers answer is found out when the
    run starts."""
    yield from _endpoint(config.generation.endpoint, config.cluster.num_nodes)
    for name, environment in config.env.items():
        if environment.agent_func is not None and not config.generation.endpoint.enabled:
            text = "asks the model where nobody answers; give generation.endpoint.enabled=true"
            yield Problem(f"env.{name}.agent_func={environment.agent_func}", text)
    generation, urls = config.generation, config.generation.server.urls
    subject = f"generation.server.urls={shown(urls)}"
    for url in urls:
        reason = url_problem(url)
        if reason is not None:
            yield Problem(f"generation.server.urls={shown(url)}", reason)
    if not urls:
        return
    if len(set(urls)) < len(urls):
        yield Problem(subject, "names a server twice")
    if generation.parallel.data != len(urls):
        text = f"is the number of engines, and there are {len(urls)} servers; give {len(urls)}"
        yield Problem(f"generation.parallel.data={generation.parallel.data}", text)
    if config.generation.colocated:
        text = "shares GPUs with the run's own engines, and servers (generation.server.urls) have theirs; use separate"
        yield Problem("generation.placement=colocated", text)
    if config.policy.moe.replay_routing:
        yield Problem("policy.moe.replay_routing=True", "a server returns no routed experts; use false")


def _endpoint(endpoint: EndpointConfig, nodes: int) -> Iterator[Problem]:
    if not endpoint.enabled:
        return
    if is_loopback(endpoint.host):
        if nodes > 1:
            text = f"is reached from one node, and agents run on {nodes}; use 0.0.0.0, and a token in {TOKEN_VARIABLE}"
            yield Problem(f"generation.endpoint.host={endpoint.host}", text)
    elif token() is None:
        text = (
            "lets whoever reaches it write what the run is trained on; put a token into the environment variable "
            f"{TOKEN_VARIABLE}, or use 127.0.0.1"
        )
        yield Problem(f"generation.endpoint.host={endpoint.host}", text)
