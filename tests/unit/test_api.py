"""What a script gives, as the command line would have it: nothing is started here."""

import io
import json
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForSequenceClassification, AutoProcessor, PreTrainedTokenizerFast, Qwen2Config
from trl import GRPOConfig

import megatron_grpo
from megatron_grpo import api
from megatron_grpo.algorithms.setup import setup
from megatron_grpo.api import format_overrides, make_environment_overrides
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.conversation_checks import load_examined_prompts
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.models import prepare
from megatron_grpo.run.user_objects import UserObjects
from tests.integration.example_rewards import right
from tests.support.image_models import draw_picture, make_image_model

ROWS = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n:03d}"} for n in range(10, 74)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, UserObjects]]:
    """Configurations that would have been run, each with what was given beside it."""
    calls: list[tuple[Config, UserObjects]] = []
    monkeypatch.setattr(api, "run_algorithm", lambda config, objects, began: calls.append((config, objects)))
    return calls


def test_the_start_up_begins_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []
    monkeypatch.setattr(api, "run_algorithm", lambda config, objects, called: began.append(called))
    before = time.time()
    megatron_grpo.train("+exp=quickstart")
    between = time.time()
    megatron_grpo.train("+exp=quickstart")
    assert before <= began[0] <= between <= began[1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eval_dataset", "no such argument; TRL's eval_dataset is val_dataset here"),
        ("reward_funcs", "no such argument; TRL's reward_funcs is rewards here"),
        ("processing_class", "no such argument; TRL's processing_class is tokenizer here"),
        ("args", "no such argument; TRL's args is config here"),
        ("model", "no such argument; settings are in config; TRL's model is policy.model.path here"),
        ("reward_fn", "no such argument; did you mean rewards?"),
        ("dataset", "no such argument; train_dataset or val_dataset here"),
        (
            "foo",
            "no such argument; there is config, train_dataset, val_dataset, rewards, environments, tokenizer, "
            "processor, callbacks; settings are in config",
        ),
    ],
)
def test_arguments_of_another_name_are_told_theirs(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        megatron_grpo.train("+exp=quickstart", **{name: None})
    assert [(problem.subject, problem.text) for problem in raised.value.problems] == [(name, text)]


def test_a_mapping_is_a_command_line(started: list[tuple[Config, UserObjects]], tmp_path: Path) -> None:
    run = megatron_grpo.train(
        {"+exp": "quickstart", "run_dir": str(tmp_path / "r"), "generation.stop_token_ids": [1, 2]}
    )
    ((config, objects),) = started
    assert run.run_dir == tmp_path / "r"
    expected = compose_config(["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "generation.stop_token_ids=[1,2]"])
    assert config == expected
    assert objects == UserObjects(rewards={}, callbacks=())
    assert run.metrics == []


@pytest.mark.parametrize("form", ["list", "generator", "dataset", "iterable dataset", "path"])
def test_datasets_and_rewards(started: list[tuple[Config, UserObjects]], tmp_path: Path, form: str) -> None:
    def score(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    full_set = Dataset.from_list(ROWS)
    dataset = {
        "list": ROWS,
        "generator": iter(ROWS),
        "dataset": full_set,
        "iterable dataset": full_set.to_iterable_dataset(),
        "path": path,
    }[form]
    megatron_grpo.train(
        ["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "env.addition.reward_weights=[1,0.5]", "checkpointing=none"],
        train_dataset=dataset,
        val_dataset={"easy": ROWS[:8], "hard": ROWS[8:]},
        rewards=[right, score],
    )
    ((config, objects),) = started
    entries = ["tests.integration.example_rewards.right", "given.score"]
    assert (config.env["addition"].type, config.env["addition"].reward_funcs) == ("reward_functions", entries)
    assert objects.rewards == {"given.score": score}
    (training,) = config.data.training_sets.values()
    assert Path(training.path).is_file()
    assert {key.split(".")[2] for key in config.data.validation_sets} == {"easy", "hard"}
    assert config.grpo.max_num_steps == 400


class Endless:
    """Rows without an end, the same ones each time."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from cycle(ROWS)


def test_an_endless_stream_is_read_while_the_run_trains(
    started: list[tuple[Config, UserObjects]], tmp_path: Path
) -> None:
    base = ["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "checkpointing=none", "data.streaming=true"]
    base += ["data.shuffle_buffer=20"]
    megatron_grpo.train(base, train_dataset=Endless())
    ((config, objects),) = started
    prepare("addition", Path(config.prepare.folder))
    model = Path(config.policy.model.path)

    def read(batches: int, state: dict[str, Any] | None = None) -> tuple[list[list[Any]], dict[str, Any]]:
        loader = load_examined_prompts(config, model, None, objects.train_rows).loader
        if state is not None:
            loader.load_state_dict(state)
        prompts = [[prompt["prompt"] for prompt in batch] for batch in islice(loader, batches)]
        return prompts, loader.state_dict()

    dataset, _ = read(4)
    first, state = read(3)
    rest, _ = read(1, state)
    assert first + rest == dataset
    with pytest.raises(ConfigError, match=r"script:train_dataset +stands for rows of a script"):
        load_examined_prompts(config, model)
    refused: list[tuple[Any, str]] = [
        (iter(ROWS), "only once"),
        ([], "begins with nothing"),
        (["a"], "begins with str"),
    ]
    for rows, text in [*refused, (["a"], "begins with str"), (7, "is int")]:
        with pytest.raises(ConfigError, match=text):
            megatron_grpo.train(base, train_dataset=rows)


def test_a_script_gives_opened_images_and_the_models_processor(
    started: list[tuple[Config, UserObjects]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["+exp=quickstart_vision", f"run_dir={tmp_path / 'r'}", "checkpointing=none"]
    base += ["prepare.name=null", f"policy.model.path={tmp_path / 'model'}"]
    make_image_model(tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    pictures = [Image.open(io.BytesIO(draw_picture(2, 3, seed=seed))) for seed in range(2)]
    rows = [{"prompt": "how many", "answer": str(n), "image": pictures[n % 2]} for n in range(64)]
    megatron_grpo.train(base, train_dataset=rows, processor=processor)
    ((config, objects),) = started
    assert objects.tokenizer is processor.tokenizer
    loader = load_examined_prompts(config, tmp_path / "model", objects.tokenizer).loader
    images = {image.digest for prompt in next(iter(loader)) for image in prompt["images"]}
    assert len(images) == 2, "stored once each"
    changed = AutoProcessor.from_pretrained(tmp_path / "model")
    changed.image_processor.size = {"shortest_edge": 64, "longest_edge": 1024}
    for wrong, text in ((changed, "ranks and engines use that of"), (processor.tokenizer, "give a loaded processor")):
        with pytest.raises(ConfigError, match=text):
            megatron_grpo.train(base, train_dataset=rows, processor=wrong)
        with pytest.raises(ConfigError, match=text), setup(config, processor=wrong):
            pytest.fail("it started")
    received = []

    def refuse(_: Config, objects: UserObjects) -> None:
        received.append(objects)
        raise RunError("nothing is started here")

    monkeypatch.setattr("megatron_grpo.algorithms.setup.open_run", refuse)
    with pytest.raises(RunError, match="nothing is started"), setup(config, processor=processor):
        pytest.fail("it started")
    assert received[0].tokenizer is processor.tokenizer


def test_a_dataset_without_answers_has_none(started: list[tuple[Config, UserObjects]], tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    base = ["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "checkpointing=none"]
    megatron_grpo.train(base, train_dataset=rows, rewards=[right])
    assert started[0][0].data.answer_key is None
    assert started[0][0].data.validation_sets == {}


def test_mistakes_are_told_and_leave_nothing(started: list[tuple[Config, UserObjects]], tmp_path: Path) -> None:
    base = ["+exp=quickstart", f"run_dir={tmp_path / 'r'}"]
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": {3}}]
    with pytest.raises(ConfigError, match=r"val_dataset\[1\] +cannot be kept as JSON: .* set .*; give numbers, texts"):
        megatron_grpo.train(base, train_dataset=ROWS, val_dataset=rows)
    assert not (tmp_path / "r" / "data").exists()
    with pytest.raises(ConfigError, match=r"train_dataset +is int; give rows \(a list of dicts, a datasets"):
        megatron_grpo.train(base, train_dataset=3)
    with pytest.raises(ConfigError, match="fewer than the 32 prompts"):
        megatron_grpo.train([*base, "checkpointing=none"], train_dataset=ROWS[:5])
    assert not (tmp_path / "r" / "data").exists()
    with pytest.raises(ConfigError, match="has two functions called reward"):
        megatron_grpo.train(base, rewards=[lambda completions: [], lambda completions: []])
    with pytest.raises(ConfigError, match="has its data and environments already"):
        megatron_grpo.train(compose_config(["+exp=quickstart"]), rewards=[right])
    assert started == []


def test_one_of_several_needs_no_list(started: list[tuple[Config, UserObjects]], tmp_path: Path) -> None:
    watcher = megatron_grpo.Callback()
    megatron_grpo.train("+exp=quickstart", rewards=right, callbacks=watcher)
    megatron_grpo.train("+exp=quickstart", rewards="tests.integration.example_rewards.right")
    entries = [config.env["addition"].reward_funcs for config, _ in started]
    assert entries == [["tests.integration.example_rewards.right"]] * 2
    assert [list(objects.callbacks) for _, objects in started] == [[watcher], []]


def test_values_of_a_mapping() -> None:
    mapping = {"a": Path("/x/y"), "b": np.int64(3), "c": [np.float64(0.5), None], "d": {"e": np.bool_(True)}}
    assert format_overrides(mapping) == ["a=/x/y", "b=3", "c=[0.5,null]", "d={e:true}"]
    with pytest.raises(ConfigError, match=r"grpo.seed +is object; give a number, a text"):
        format_overrides({"grpo.seed": object()})
    with pytest.raises(ConfigError, match=r"data.tasks.one +is set; give"):
        format_overrides({"data.tasks": {"one": {1}}})
    with pytest.raises(ConfigError, match=r"config +is int; give a list of overrides"):
        format_overrides(3)
    with pytest.raises(ConfigError, match=r"config\[1\] +is int; give the text of an override"):
        format_overrides(["+exp=quickstart", 3])


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"rewards": [3]}, r"rewards\[0\] +is int; give a function, its import path"),
        ({"rewards": {"right": right}}, r"rewards +is dict; give a list"),
        ({"callbacks": [print]}, r"callbacks\[0\] +is builtin_function_or_method; give an object of a class that ext"),
        ({"callbacks": [megatron_grpo.Callback]}, r"callbacks\[0\] +is the class Callback; .* such as MyCallback\(\)"),
        ({"callbacks": megatron_grpo.Callback}, r"callbacks +is the class Callback; give a list, each an object"),
        ({"tokenizer": "model"}, r"tokenizer +is str; give a loaded tokenizer"),
        (
            {"environments": {"addition": UserObjects()}},
            r"environments\['addition'\] +is an object of UserObjects; give the class",
        ),
        ({"environments": [UserObjects]}, r"environments +is list; give a mapping of task names to classes"),
        ({"environments": {"my task": UserObjects}}, r"environments\['my task'\] +cannot be the NAME of env.NAME"),
        ({"val_dataset": {"a b": ROWS}}, r"val_dataset\['a b'\] +cannot be the NAME .*letters .*, digits, _ and -"),
        ({"val_dataset": {"v1.5": ROWS}}, r"val_dataset\['v1.5'\] +cannot be the NAME of data.val_sets.NAME"),
        ({"val_dataset": {"5a": ROWS}}, r"a letter or _ first"),
    ],
)
def test_objects_of_another_kind(
    started: list[tuple[Config, UserObjects]], tmp_path: Path, objects: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        megatron_grpo.train(["+exp=quickstart", f"run_dir={tmp_path / 'r'}"], **objects)
    assert len(raised.value.problems) == 1
    assert not (tmp_path / "r").exists()
    assert started == []


def test_a_run_needs_a_configuration() -> None:
    with pytest.raises(ConfigError, match=r"config +is missing; give overrides as on the command line \(\['\+exp="):
        megatron_grpo.train()
    with pytest.raises(ConfigError) as raised:
        megatron_grpo.train(rewards=[right], train_dataset=ROWS, args=None)
    assert [problem.subject for problem in raised.value.problems] == ["args"], "which says that it is config here"


@pytest.mark.parametrize("kind", ["a model", "a model of a list", "a tokenizer", "a class of models"])
def test_objects_of_transformers_are_no_reward_functions(tmp_path: Path, kind: str) -> None:
    """They are callable, so that a run would find out late; TRL takes models."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=16, num_key_value_heads=1, num_labels=1, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    arguments_by_kind: Any = {
        "a model": model,
        "a model of a list": [right, model],
        "a tokenizer": words,
        "a class of models": [type(model)],
    }
    with pytest.raises(ConfigError) as raised:
        megatron_grpo.train(["+exp=quickstart", f"run_dir={tmp_path / 'r'}"], rewards=arguments_by_kind[kind])
    (problem,) = raised.value.problems
    assert problem.subject == ("rewards[1]" if "list" in kind else "rewards[0]" if "class" in kind else "rewards")
    assert "folder with save_pretrained, and give the folder: rewards=['./FOLDER']" in problem.text


def test_settings_of_trls_configuration_are_told_their_keys() -> None:
    settings = GRPOConfig(output_dir="run", use_cpu=True, bf16=False, beta=0.04, num_generations=4, weight_decay=0.1)
    texts_by_key = {
        "output_dir=run": "TRL's output_dir is run_dir here",
        "beta=0.04": "TRL's beta is loss_fn.reference_policy_kl_penalty here",
        "num_generations=4": "TRL's num_generations is grpo.num_generations_per_prompt here",
        "weight_decay=0.1": "TRL's weight_decay is policy.optimizer.weight_decay here",
    }
    for name, first, keywords in (
        ("config", "is GRPOConfig; give overrides as on the command line", {"config": settings}),
        ("args", "no such argument; TRL's args is config here", {"args": settings}),
    ):
        with pytest.raises(ConfigError) as raised:
            megatron_grpo.train(**keywords)
        first_problem, *rest = raised.value.problems
        assert first_problem.subject == name
        assert first_problem.text.startswith(first)
        assert {problem.subject: problem.text for problem in rest} == {
            f"{name}.{key}": text for key, text in texts_by_key.items()
        }


def test_a_model_that_is_loaded_is_given_by_its_folder() -> None:
    model = AutoModelForSequenceClassification.from_config(
        Qwen2Config(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ConfigError, match=r"policy.model.path in config; write it and its tokenizer into a folder"):
        megatron_grpo.train("+exp=quickstart", model=model)


@pytest.mark.parametrize("form", ["class", "handle"])
def test_actors_of_ray_are_no_environments(form: str) -> None:
    class Guessing:
        def step(self, message_log_batch: Any, metadata: Any) -> None: ...

    class Handle(ray.actor.ActorHandle):  # as ActorClass.remote() returns it, without a cluster
        __init__ = object.__init__

        def __del__(self) -> None: ...

    actor: Any = Handle() if form == "handle" else ray.remote(Guessing)
    with pytest.raises(ConfigError, match=r"is a Ray actor, and the run starts the processes .*env.math.num_workers"):
        megatron_grpo.train("+exp=quickstart", environments={"math": actor})


def test_a_processor_has_the_tokenizer() -> None:
    class Processor:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))

    with pytest.raises(ConfigError, match=r"is Processor; give it as processor"):
        megatron_grpo.train("+exp=quickstart", tokenizer=Processor())


@pytest.mark.parametrize("name", ["easy_2", "gsm-8k", "_x", "2024", 3])
def test_names_of_validation_sets(started: list[tuple[Config, UserObjects]], tmp_path: Path, name: Any) -> None:
    megatron_grpo.train(["+exp=quickstart", f"run_dir={tmp_path / 'r'}"], val_dataset={name: ROWS})
    assert list(started[0][0].data.validation_sets) == [f"data.val_sets.{name}.path"]


def test_environments_are_named_by_where_they_are(tmp_path: Path) -> None:
    environment_overrides = make_environment_overrides({"math": "math", "mine": UserObjects})
    assert environment_overrides == ["env.math.type=math", "env.mine.type=megatron_grpo.run.user_objects:UserObjects"]
    local = type("Local", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="cannot be imported by the processes of the run"):
        megatron_grpo.train("+exp=quickstart", environments={"mine": local})
