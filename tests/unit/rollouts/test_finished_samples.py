"""Finished samples of an earlier start: which are taken up, and which are drawn again."""

import json
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.batch.finished_samples import PICKLE, FinishedSamples, digest_request, remove_taken
from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.data.scores import EncodedTurn, EnvironmentReturn, TrainerState
from megatron_grpo.environments.states import pack_state, unpack_state
from megatron_grpo.models.image_store import store_image
from megatron_grpo.rollouts.failures import RolloutFailure
from megatron_grpo.rollouts.rollout import GroupRollout, RolloutSettings
from tests.support.virtual_time import run_at_once
from tests.unit.rollouts.test_rollout import BATCH_SETTINGS, DATUM, SEEDS, FakeEngine, FakeEnvironment

SETTINGS = replace(BATCH_SETTINGS, trainer_state=TrainerState(global_step=7), max_age_steps=1)  # tokens: versions 6, 7


class PackedEnvironment(FakeEnvironment):
    """An environment whose states are bytes, as processes of environments give them."""

    async def reset(self, prompt: Any, extra_env_info: dict[str, Any], *, is_repeated: bool) -> Any:
        return pack_state([])

    async def step(
        self, state: Any, response: str, last_token: int, images: Images, *, is_repeated: bool
    ) -> EncodedTurn:
        return EncodedTurn(state=pack_state([*unpack_state(state), response]))

    async def score(self, requests: list[Any]) -> list[Any]:
        self.jobs.append([unpack_state(request.state) for request in requests])
        return [EnvironmentReturn(float(len(request.response)), True) for request in requests]


def run(
    folder: Path, engine: FakeEngine, settings: RolloutSettings = SETTINGS, environment: Any = None, worker: int = 0
) -> list[Trajectory]:
    newest = settings.trainer_state.global_step
    versions = range(newest - settings.max_age_steps, newest + 1)
    finished = FinishedSamples(folder, settings.generation_batch, worker, versions)

    async def scene() -> list[Trajectory]:
        group = GroupRollout(4, DATUM, settings, engine, environment or PackedEnvironment(), None, finished)  # type: ignore[arg-type]
        engine.assign([settings.samples_per_prompt])
        await group.sample(engine)  # type: ignore[arg-type]
        return await group.score()

    trajectories = run_at_once(scene())
    assert engine.load == 0
    return trajectories


def test_a_later_start_takes_up_what_is_finished_and_scores_it_anew(tmp_path: Path) -> None:
    first = FakeEngine(trouble={SEEDS[1]: [RolloutFailure("no")] * 2})
    drawn = run(tmp_path, first)
    later, environment = FakeEngine(), PackedEnvironment()
    resumed = run(tmp_path, later, environment=environment, worker=3)
    assert [request.seed for request in later.requests] == [SEEDS[1]]  # only the sample that failed
    for sample in (0, 2):
        assert resumed[sample].to_row() == drawn[sample].to_row()
    assert environment.jobs == [[[trajectory.response] for trajectory in resumed]]
    assert run(tmp_path, last := FakeEngine(), worker=1)[1].to_row() == resumed[1].to_row()
    assert last.requests == []


@pytest.mark.parametrize(
    "changes",
    [
        {"generation_batch": 3},
        {"run_seed": 6},
        {"max_turns": 2},
        {"max_total_sequence_length": 11},
        {"sampling": replace(SETTINGS.sampling, temperature=0.5)},
        {"trainer_state": TrainerState(global_step=6)},  # the tokens are of later weights
        {"trainer_state": TrainerState(global_step=8)},  # they are too old
        {"max_age_steps": 0},
    ],
)
def test_other_requests_are_drawn(changes: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    run(tmp_path, engine := FakeEngine(), replace(SETTINGS, **changes))
    assert len(engine.requests) == 3


def test_another_prompt_in_the_same_row_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, FakeEngine())
    monkeypatch.setitem(DATUM["message_log"][1], "token_ids", [4])
    run(tmp_path, engine := FakeEngine())
    assert len(engine.requests) == 3


def test_another_image_under_the_same_tokens_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [store_image(tmp_path / "images", content) for content in (b"a", b"b")]
    for number, count in ((0, 3), (0, 0), (1, 3)):
        monkeypatch.setitem(DATUM, "images", [StoredImage(digests[number], 2, 2)])
        run(tmp_path / "finished", engine := FakeEngine())
        assert len(engine.requests) == count


def test_a_sample_whose_image_is_gone_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = store_image(tmp_path / "images", b"a")
    monkeypatch.setitem(DATUM, "images", [StoredImage(digest, 2, 2)])
    drawn = run(tmp_path / "finished", FakeEngine())
    assert [trajectory.images for trajectory in run(tmp_path / "finished", FakeEngine())] == [drawn[0].images] * 3
    (tmp_path / "images" / digest).unlink()
    run(tmp_path / "finished", engine := FakeEngine())
    assert len(engine.requests) == 3


def test_lines_that_are_damaged_or_cut_off_count_as_absent(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().splitlines()
    record = json.loads(lines[1])
    record["state"] = [1]  # no text: nothing that a file holds is unpickled
    file.write_bytes(b"\n".join([b'{"digest"', json.dumps(record).encode(), lines[2][:-9]]))
    run(tmp_path, engine := FakeEngine())
    assert len(engine.requests) == 3
    run(tmp_path, again := FakeEngine())  # the cut-off line did not spoil the first that followed
    assert again.requests == []


def test_states_that_are_no_json_are_not_kept(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(), environment=OtherStates())
    run(tmp_path, engine := FakeEngine(), environment=OtherStates())
    assert len(engine.requests) == 3


class OtherStates(PackedEnvironment):
    async def step(
        self, state: Any, response: str, last_token: int, images: Images, *, is_repeated: bool
    ) -> EncodedTurn:
        return EncodedTurn(state=pack_state({response}))


def test_files_of_batches_that_a_checkpoint_has_are_removed(tmp_path: Path) -> None:
    for batch in (1, 2, 10):
        run(tmp_path, FakeEngine(), replace(SETTINGS, generation_batch=batch))
    (tmp_path / "notes.txt").write_text("mine")
    remove_taken(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch_10.worker_0.jsonl", "notes.txt"]
    remove_taken(tmp_path / "absent", 2)


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "batch_2.worker_9.jsonl")
    with pytest.raises(ValueError, match="batch_2"):
        FinishedSamples(tmp_path, 2, 0, range(8))


LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(PLAIN)
def test_plain_states_travel_as_json(state: Any) -> None:
    content = pack_state(state)
    assert repr(unpack_state(content)) == repr(state)
    assert json.loads(content) == state


def test_other_states_travel_pickled() -> None:
    for state in ((1, 2), OrderedDict(a=1), {1: 2}, np.float64(0.5), float("nan")):
        content = pack_state(state)
        assert repr(unpack_state(content)) == repr(state)
        assert content.startswith(PICKLE)
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert unpack_state(pack_state(deep)) == deep


def test_a_digest_tells_requests_apart() -> None:
    assert digest_request(1, "2") != digest_request("1", 2)
