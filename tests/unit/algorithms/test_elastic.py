"""Engines that are added and removed between steps, by parts of a run that only say what they were told."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms import elastic
from megatron_grpo.algorithms.elastic import EngineResizer
from megatron_grpo.cluster.engine_nodes import Node
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.engine_checks import explain_fixed_engines
from megatron_grpo.run.engine_requests import EngineRequest, read_states, write_request
from megatron_grpo.weight_sync.refit_calls import PolicyLostError, RefitError


class Parts:
    """In place of the engines, the refit, the rollout workers and the cluster."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.engines: dict[int, str] = {0: "actor"}
        self.starts = {0: self.make_start()}
        self.restarts: Counter[int] = Counter()
        self.added: dict[int, str] = {}
        self.next_number = 1
        self.outcomes: dict[int, str | None] = {}
        """By the number of a starting engine, None once it can sample, or why it cannot."""
        self.refit_fails: RefitError | None = None
        self.leaving: set[int] = set()
        self.unfinished: dict[int, int] = {}
        self.lack: str | None = None
        self.hosts: dict[int, set[str]] = {}
        self.room: list[tuple[str, ...]] = []

    @staticmethod
    def make_start() -> Any:
        """The report of an engine's start."""
        return SimpleNamespace(processes=SimpleNamespace(node="f00d"))

    def begin_add(self) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        self.added[number] = "actor"
        return number

    def take_added(self) -> Iterator[tuple[int, str | None]]:
        for number in [*self.outcomes]:
            reason = self.outcomes.pop(number)
            del self.added[number]
            if reason is None:
                self.engines[number], self.starts[number] = "actor", self.make_start()
            yield number, reason

    def remove(self, number: int) -> None:
        del self.engines[number], self.starts[number]
        self.log.append(f"{number} ends")

    def join(self, number: int, version: int) -> None:
        if self.refit_fails is not None:
            raise self.refit_fails
        self.log.append(f"{number} gets version {version}")

    def leave(self, number: int) -> None:
        self.log.append(f"{number} gets no more weights")

    def share_engines(self) -> None:
        self.log.append(f"prompts go to {sorted(self.engines.keys() - self.leaving)}")

    def hand_back(self, number: int) -> None:
        self.unfinished.pop(number, None)
        self.log.append(f"{number} hands back")

    def forget_idle_engines(self) -> dict[int, int]:
        self.leaving &= self.unfinished.keys()
        return dict(self.unfinished)

    def reserve_engine(self, number: int, hosts: tuple[str, ...] = ()) -> None:
        self.log.append(f"devices for {number}{' on ' * bool(hosts)}{'+'.join(hosts)}")

    def release_engine(self, number: int) -> None:
        self.log.append(f"no devices for {number}")

    def explain_lack(self, number: int) -> str | None:
        return self.lack

    def list_hosts(self, number: int) -> set[str]:
        return self.hosts.get(number, set())

    def take_places(self, nodes: list[Node]) -> list[tuple[str, ...]]:
        room, self.room = self.room, []
        return room


class Scene:
    """A run with one engine."""

    def __init__(self, folder: Path, refusal: str | None = None, drain_notice_s: float | None = None) -> None:
        self.folder, self.notes, self.parts = folder, list[str](), Parts()
        parts: Any = self.parts
        self.resizer = EngineResizer(
            *(parts, parts, parts, parts, folder),
            refusal=refusal,
            drain_notice_s=drain_notice_s,
            note=self.notes.append,
        )
        self.resizer.resize(0)

    def resize(self, version: int, *requests: EngineRequest) -> tuple[list[str], list[str]]:
        """What was done, and what was said."""
        self.notes.clear()
        self.parts.log.clear()
        for request in requests:
            write_request(self.folder, request)
        self.resizer.resize(version)
        return self.parts.log, self.notes

    def states(self) -> list[tuple[int, str, str | None, int]]:
        """What the run tells of its engines."""
        return [
            (engine.number, engine.state, engine.node, engine.unfinished) for engine in read_states(self.folder).engines
        ]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    nodes = [{"NodeID": "f00d", "NodeManagerAddress": "10.0.0.1"}]
    monkeypatch.setattr(elastic, "ray", SimpleNamespace(nodes=lambda: nodes))
    return Scene(tmp_path)


HOME = "10.0.0.1"


def test_an_added_engine_starts_beside_the_others_and_gets_weights_before_prompts(scene: Scene) -> None:
    assert scene.resize(1, EngineRequest()) == (["devices for 1"], ["generation engine 1 is being started"])
    assert scene.states() == [(0, "serving", HOME, 0), (1, "starting", None, 0)]
    assert scene.resize(2) == ([], []), "it has not started"
    scene.parts.outcomes[1] = None
    actions, notes = scene.resize(3)
    assert actions == ["1 gets version 3", "prompts go to [0, 1]"]
    assert notes == ["generation engine 1 serves version 3 of the weights"]
    assert scene.states() == [(0, "serving", HOME, 0), (1, "serving", HOME, 0)]


@pytest.mark.parametrize("lack", [None, "it needs 8 GPUs"])
def test_an_engine_that_does_not_start_is_dropped_and_the_run_goes_on(scene: Scene, lack: str | None) -> None:
    scene.resize(1, EngineRequest())
    scene.parts.outcomes[1], scene.parts.lack = "it died", lack
    text = f"generation engine 1 was not added: {lack or 'it died'}"
    assert scene.resize(2) == (["no devices for 1"], [text])
    assert scene.states() == [(0, "serving", HOME, 0)]
    assert scene.resize(3, EngineRequest())[0] == ["devices for 2"], "no number comes again"


def test_an_engine_that_does_not_get_the_weights_is_dropped(scene: Scene) -> None:
    scene.resize(1, EngineRequest())
    scene.parts.outcomes[1], scene.parts.refit_fails = None, RefitError("other numbers")
    text = "generation engine 1 was not added: other numbers"
    assert scene.resize(2) == (["1 ends", "no devices for 1"], [text])


def test_a_lost_rank_ends_what_was_being_added_and_leaves_the_rest_for_later(scene: Scene) -> None:
    scene.resize(1, EngineRequest(), EngineRequest())
    scene.parts.outcomes |= {1: None, 2: None}
    scene.parts.refit_fails = PolicyLostError("rank 0 is gone")
    with pytest.raises(PolicyLostError):
        scene.resize(2)
    assert list(scene.parts.engines) == [0], "no engine without weights is among those that get prompts"
    scene.parts.refit_fails = None
    assert scene.resize(2)[0] == ["2 gets version 2", "prompts go to [0, 2]"]


def add(scene: Scene) -> None:
    """A second engine, which serves."""
    scene.resize(1, EngineRequest())
    scene.parts.outcomes[1] = None
    scene.resize(2)


def test_an_engine_leaves_when_its_rollouts_have_ended(scene: Scene) -> None:
    add(scene)
    scene.parts.unfinished[0] = 3
    assert scene.resize(3, EngineRequest(remove=0)) == (["prompts go to [1]"], [])
    assert scene.states() == [(0, "leaving", HOME, 3), (1, "serving", HOME, 0)]
    assert scene.resize(4) == ([], [])
    del scene.parts.unfinished[0]
    end = ["0 gets no more weights", "0 ends", "no devices for 0"]
    assert scene.resize(5) == (end, ["generation engine 0 has left the run"])
    assert scene.states() == [(1, "serving", HOME, 0)]


def test_an_engine_that_leaves_at_once_hands_back_its_rollouts(scene: Scene) -> None:
    add(scene)
    scene.parts.unfinished[0] = 3
    scene.resize(3, EngineRequest(remove=0))
    actions, _ = scene.resize(4, EngineRequest(remove=0, now=True))
    assert actions == ["prompts go to [1]", "0 hands back", "0 gets no more weights", "0 ends", "no devices for 0"]


def test_the_last_engine_and_unknown_ones_stay(scene: Scene) -> None:
    add(scene)
    scene.parts.unfinished[1] = 1
    actions, notes = scene.resize(3, EngineRequest(remove=9), EngineRequest(remove=1), EngineRequest(remove=0))
    assert actions == ["prompts go to [0]"]
    assert notes == [
        "generation engine 9 is not removed: it is none of the engines that serve",
        "generation engine 0 is not removed: it is the last one",
    ]


def test_engines_start_where_nodes_join(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "read_nodes", lambda: [Node("f00d", "10.0.0.1")])
    follower = Scene(scene.folder, drain_notice_s=100.0)
    for waiting in (follower, scene):
        waiting.parts.room = [("new",), ("a", "b")]
    actions = ["devices for 1 on new", "devices for 2 on a+b"]
    assert follower.resize(1) == (actions, [f"generation engine {number} is being started" for number in (1, 2)])
    assert follower.resize(2) == ([], [])
    assert scene.resize(1) == ([], []), "engines follow nodes only if they are told to"


@pytest.mark.parametrize("seconds", [50.0, 150.0])
def test_engines_leave_where_a_node_drains(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "ray", SimpleNamespace(nodes=list))
    monkeypatch.setattr(elastic, "time", SimpleNamespace(time=lambda: 1000.0))
    nodes = [Node("f00d", "10.0.0.1"), Node("other", "10.0.0.2")]
    monkeypatch.setattr(elastic, "read_nodes", lambda: nodes)
    scene = Scene(tmp_path, drain_notice_s=100.0)
    add(scene)
    scene.parts.unfinished[1] = 3
    scene.parts.hosts = {1: {"other"}}
    assert scene.resize(3) == ([], [])
    nodes[1] = Node("other", "10.0.0.2", drains_until=1000.0 + seconds)
    actions, notes = scene.resize(4)
    assert notes[0] == "generation engine 1 leaves node 10.0.0.2, which drains"
    if seconds < 100:
        end = ["1 gets no more weights", "1 ends", "no devices for 1"]
        assert actions == ["prompts go to [0]", "1 hands back", *end]
        return
    assert actions == ["prompts go to [0]"]
    assert scene.resize(5) == ([], []), "it is leaving"
    nodes[0] = Node("f00d", "10.0.0.1", drains_until=1001.0)
    assert scene.resize(6) == ([], []), "it is the last one"


def test_a_run_whose_engines_are_fixed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "ray", SimpleNamespace(nodes=list))
    scene = Scene(tmp_path, refusal="they are servers")
    assert scene.resize(1, EngineRequest()) == ([], ["engines stay as they are: they are servers"])
    assert read_states(tmp_path).refusal == "they are servers"


def test_engines_that_others_own_or_nobody_refits_are_fixed() -> None:
    config = Config()
    assert explain_fixed_engines(config) is None
    config.debug.train = False
    assert "debug.train=false" in str(explain_fixed_engines(config))
    config.generation.placement = "colocated"
    assert "placement=colocated" in str(explain_fixed_engines(config))
    config.generation.server.urls = ["http://127.0.0.1:1"]
    assert "server.urls" in str(explain_fixed_engines(config))
