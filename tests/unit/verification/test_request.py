"""Command lines of verify: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import re

import pytest

from megatron_grpo import verify
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.verify import read_layouts, read_request


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tp2", ParallelConfig(tensor=2)),
        ("TP2pp2", ParallelConfig(tensor=2, pipeline=2)),
        ("tp4cp2sp", ParallelConfig(tensor=4, context=2, sequence=True)),
        ("dp2cp2", ParallelConfig(data=2, context=2)),
    ],
)
def test_a_layout_is_read_from_its_name(name: str, expected: ParallelConfig) -> None:
    assert read_layouts("layouts", name) == [(name, expected)]


def test_a_request_says_what_is_verified() -> None:
    request = read_request(
        ["model=tiny:llama", "layouts=[tp2, cp2dp2]", "packing=both", "steps=2", "timeout_s=9.5", "--json"]
    )
    assert (request.model, request.packing, request.steps, request.timeout_s, request.json) == (
        "tiny:llama",
        (True, False),
        2,
        9.5,
        True,
    )
    assert [name for name, _ in request.layouts] == ["tp2", "cp2dp2"]
    assert read_request([]).packing == (True,)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("layout=tp2", "did you mean layouts=?"),
        ("--fast", "--fast is not an argument; there is model=, layouts="),
        ("layouts=[tp2,xx]", "layouts=xx is not a layout"),
        ("layouts=tp2tp2", "layouts=tp2tp2 is not a layout"),
        ("layouts=tp0", "layouts=tp0 is not a layout"),
        ("layouts=cp2sp", "sp needs tp2 or more"),
        ("packing=maybe", "packing=maybe must be one of true, false, both"),
        ("shrink=perhaps", "shrink=perhaps must be true or false"),
        ("steps=many", "steps=many must be int > 0"),
        ("sequences=0", "sequences=0 must be int > 0"),
    ],
)
def test_what_means_nothing_is_said_so(argument: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        read_request([argument])
    assert verify.main([argument]) == 2
    assert capsys.readouterr().err.startswith("verify: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["model=tiny:gpt7"], "use tiny: and one of qwen3, qwen2, llama, gemma3"),
        (["model=/nowhere"], "model=/nowhere has no config.json"),
        (["layouts=tp3"], "layouts=tp3: tensor=3 does not divide the model's 4 attention heads"),
        (["layouts=pp3"], "layouts=pp3: pipeline=3 does not divide the model's 4 layers"),
        (["layouts=vp2"], "layouts=vp2: virtual_pipeline=2 needs parallel.pipeline > 1"),
        (["layouts=pp2vp4"], "layouts=pp2vp4: virtual_pipeline=4 does not divide the 2 layers of a pipeline rank"),
        (["layouts=ep2"], "layouts=ep2: expert=2 the model has no experts"),
        (["layouts=dp4", "sequences=3"], "sequences=3 do not give each of 4 data-parallel replicas one"),
    ],
)
def test_what_the_model_does_not_bear_is_refused_before_a_process_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(arguments) == 2
    assert text in capsys.readouterr().err
