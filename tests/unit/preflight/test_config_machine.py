"""What a configuration asks of the machine: rows, files, folders, models, packages, GPUs."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.preflight.load import check_overrides, compose_config, load_config
from megatron_grpo.preflight.machine_checks import examine_machine
from megatron_grpo.run.directory import lock_run_directory, record_start
from tests.support.config_problems import SMALL, problems_of


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ('{"prompt": "1?", "ans', "not valid JSON"),
        ("[1]", "is list, not an object"),
        ('{"question": "1?", "answer": "1"}', "no column 'prompt' (data.prompt_key); it has question, answer"),
        ('{"prompt": "1?"}', "no column 'answer' (data.answer_key)"),
        ('{"prompt": 1, "answer": "1"}', "neither a text nor a list"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "neither a text nor a list"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": null}], "answer": "1"}',
            "column 'prompt' has a message (number 2) whose content is null; it must be text",
        ),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a"}]}], "answer": "1"}',
            "column 'prompt' has a message (number 1) whose content is a list of parts; it must be text",
        ),
        ('{"prompt": "1?", "answer": null}', "column 'answer' (data.answer_key) is null"),
        ('{"prompt": "1?", "answer": "1", "task_name": ["code"]}', "task_name ['code'] is not an environment"),
        ('{"prompt": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ("[" * 100_000, "is not JSON that can be read"),
        (
            '{"prompt": "1?", "answer": "1", "task_name": "code"}',
            "task_name 'code' is not an environment; env has math",
        ),
    ],
)
def test_bad_rows_are_named_by_file_and_line(base_overrides: list[str], rows: Path, row: str, text: str) -> None:
    with rows.open("a") as file:
        file.write(row)
    ((problem, message),) = problems_of(base_overrides).items()
    assert problem == f"{rows}:41"
    assert text in message


def test_rows_with_one_mistake_are_one_problem(base_overrides: list[str], rows: Path) -> None:
    wrong = '{"question": "1?"}\n'
    text = "has no column 'prompt' (data.prompt_key); it has question; did you mean data.prompt_key=question?"
    rows.write_text(wrong * 100)
    assert problems_of(base_overrides) == {str(rows): f"{text} (as in all of its 100 rows)"}
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' + wrong * 99)
    assert problems_of(base_overrides) == {f"{rows}:2": f"{text}; 98 other rows too"}


def test_rows_that_are_all_left_out_are_explained(base_overrides: list[str], rows: Path) -> None:
    rows.write_text('{"question": "1?"}\n' * 100)
    (text,) = problems_of([*base_overrides, "data.bad_rows=skip"]).values()
    assert text.startswith(
        "has 0 rows, fewer than the 32 prompts of a batch; add rows or lower grpo.num_prompts_per_step (100"
    )
    assert "has no column 'prompt' (data.prompt_key); it has question" in text


def test_many_mistakes_are_summed_up(base_overrides: list[str], rows: Path) -> None:
    rows.write_text("".join(f'{{"column_{number}": 1}}\n' for number in range(100)))
    problems = problems_of(base_overrides)
    assert list(problems) == [*(f"{rows}:{line}" for line in range(1, 6)), str(rows)]
    assert problems[str(rows)] == "95 more bad lines of 100"


def test_an_answer_that_cannot_be_compared_names_its_environment(base_overrides: list[str], rows: Path) -> None:
    row = '{"prompt": "1?", "answer": "one"}\n'
    rows.write_text(row * 3)
    overrides = [*base_overrides, "env.addition.type=addition", "data.task_name=addition"]
    ((_, text),) = problems_of(overrides).items()
    assert "is not the digits of a sum" in text
    assert '"one" (env.addition.type=addition compares with it) (as in all of its 3 rows)' in text


def test_missing_files(model: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problems = problems_of(
        [
            "policy.model.path=/nowhere",
            "data.train_path=/nowhere/train.jsonl",
            "data.val_path=/nowhere/val.jsonl",
            f"run_dir={tmp_path}/file/run",
            "checkpointing.resume=/nowhere/step_3",
        ]
    )
    assert {subject.partition("=")[0] for subject in problems} == {
        "policy.model.path",
        "data.train_path",
        "data.val_path",
        "run_dir",
        "checkpointing.resume",
    }


def test_folders_that_no_run_can_have(base_overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("nowhere")
    ((_, dangling),) = problems_of([*base_overrides, f"run_dir={tmp_path}/latest"]).items()
    assert "leads nowhere" in dangling
    assert problems_of([*base_overrides, "run_dir=''"]) == {"run_dir=": "is empty; give a folder"}


def test_an_environment_without_prompts(base_overrides: list[str], rows: Path) -> None:
    extra = [*base_overrides, "env.code.type=math"]
    ((subject, text),) = problems_of(extra).items()
    assert subject == "env.code"
    assert "no row has task_name code" in text
    with rows.open("a") as file:
        file.write('{"prompt": "1?", "answer": "1", "task_name": "code"}')
    load_config(extra)


def test_a_tracker_that_is_not_installed(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        "pip install wandb" in problems_of([*base_overrides, "logger.wandb.enabled=true"])["logger.wandb.enabled=True"]
    )


def test_fused_kernels_need_a_gpu_or_the_interpreter(
    base_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, subject = [*base_overrides, "policy.logprob_kernel=fused"], "policy.logprob_kernel=fused"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text = problems_of(extra)[subject]
    assert "cluster.gpus_per_node=0; use chunked or auto, or set TRITON_INTERPRET=1" in text
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    load_config(extra)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in problems_of(extra)[subject]


def test_too_few_rows(base_overrides: list[str], rows: Path) -> None:
    ((subject, text),) = problems_of([*base_overrides, "grpo.num_prompts_per_step=41"]).items()
    assert subject == f"data.train_path={rows}"
    assert "has 40 rows" in text


def test_incomplete_model_folders(base_overrides: list[str], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        load_config(base_overrides)
    assert ["safetensors" in p.text or "tokenizer" in p.text for p in caught.value.problems] == [True, True]
    (model / "config.json").write_text(json.dumps({**SMALL, "architectures": ["GPT2LMHeadModel"]}))
    (text,) = problems_of(base_overrides).values()
    assert "architecture GPT2LMHeadModel is not supported" in text


def test_a_hub_name_in_the_cache_is_found(
    rows: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    overrides = ["policy.model.path=org/name", f"data.train_path={rows}", f"run_dir={tmp_path / 'run'}"]
    ((subject, _),) = problems_of([*overrides, "policy.parallel.tensor=3"]).items()
    assert subject == "policy.parallel.tensor=3"
    assert examine_machine(load_config(overrides))[0] == []


def test_a_driver_without_a_gpu_cannot_estimate_advantages_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cluster has GPUs, and may be elsewhere."""
    monkeypatch.setattr("megatron_grpo.preflight.machine_checks.count_visible_gpus", lambda: 0)
    monkeypatch.setattr("megatron_grpo.preflight.machine_checks.check_reachable", lambda address: None)
    config = compose_config(["+exp=quickstart_ppo", "cluster.gpus_per_node=8", "cluster.ray_address=10.0.0.1:6379"])
    assert examine_machine(config)[0] == []
    config.ppo.calculate_advantages_on_gpu = True
    ((problem,), _) = examine_machine(config)
    assert problem.subject == "ppo.calculate_advantages_on_gpu=True"


def test_addresses_where_no_ray_is(base_overrides: list[str]) -> None:
    ((_, text),) = problems_of([*base_overrides, "cluster.ray_address=nonsense"]).items()
    assert "give HOST:PORT" in text
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert problems_of([*base_overrides, f"cluster.ray_address={address}"]) == {
        f"cluster.ray_address={address}": "no Ray cluster answers there: Connection refused"
    }


@pytest.mark.parametrize("token", [SMALL["vocab_size"], 10**9])
def test_stop_tokens_that_the_model_has_not(base_overrides: list[str], token: int) -> None:
    ((subject, text),) = problems_of([*base_overrides, f"generation.stop_token_ids=[0,{token}]"]).items()
    assert subject == "generation.stop_token_ids"
    assert f"has {token}" in text
    load_config([*base_overrides, "generation.stop_token_ids=[0,127]"])


@pytest.mark.parametrize(
    ("content", "usable"),
    [({}, False), ({"chat_template": None}, False), ({"chat_template": "{{ messages }}"}, True), ([], True)],
)
def test_a_tokenizer_without_a_chat_template(
    base_overrides: list[str], model: Path, content: object, usable: bool
) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(content))
    plain = [*base_overrides, "data.apply_chat_template=false"]
    load_config(plain)
    if usable:
        load_config(base_overrides)
        return
    assert "has no chat template" in problems_of(base_overrides)["data.apply_chat_template=True"]
    (model / "chat_template.jinja").touch()
    load_config(base_overrides)


def test_prompts_that_are_all_the_same_are_remarked_on(base_overrides: list[str], rows: Path) -> None:
    assert [remark.subject for remark in check_overrides(base_overrides).remarks] == []
    rows.write_text('{"prompt": "1?", "answer": "1"}\n' * 40)
    (remark,) = check_overrides(base_overrides).remarks
    assert (remark.subject, remark.text) == (f"data.train_path={rows}", "has the same prompt in all of its 40 rows")


def test_a_folder_of_another_run(base_overrides: list[str], rows: Path, tmp_path: Path) -> None:
    config = load_config(base_overrides)
    with lock_run_directory(config.run_dir) as folder:
        record_start(folder, config)
    load_config(base_overrides)
    rows_path = tmp_path / "other.jsonl"
    rows_path.write_bytes(rows.read_bytes())
    load_config([*base_overrides, f"data.train_path={rows_path}"])  # the same data under another name
    rows_path.write_bytes(rows.read_bytes().replace(b"1", b"2"))
    ((subject, text),) = problems_of([*base_overrides, f"data.train_path={rows_path}"]).items()
    assert subject == f"run_dir={folder}"
    assert f"holds another run: data.train_path={rows_path} has other rows" in text


def test_checkpoints_that_cannot_be_started_from(base_overrides: list[str], tmp_path: Path) -> None:
    step = tmp_path / "elsewhere" / "step_3"
    step.mkdir(parents=True)
    subject = f"checkpointing.resume={step}"
    assert "is not a checkpoint: it has no folder megatron" in problems_of([*base_overrides, subject])[subject]
    (step / "megatron").mkdir()
    load_config([*base_overrides, subject])
    assert "it has no value model" in problems_of([*base_overrides, "algorithm=ppo", subject])[subject]
    (tmp_path / "run" / "checkpoints" / "step_7").mkdir(parents=True)
    assert "up to step 7" in problems_of([*base_overrides, "checkpointing.resume=none"])["checkpointing.resume=none"]


def test_a_folder_locked_by_another_user(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(base_overrides)
    with lock_run_directory(config.run_dir) as folder:
        record_start(folder, config)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != ".lock")
    ((subject, text),) = problems_of(base_overrides).items()
    assert subject == f"run_dir={config.run_dir}"
    assert text == f"{folder}/.lock is another user's; choose another run_dir"


def test_a_hub_that_cannot_be_reached_is_asked_once(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A proxy that nobody runs stands for having no network."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    begin = time.monotonic()
    path = "policy.model.path=org/no-such-model"
    problems = problems_of([path, f"data.train_path={rows}", f"run_dir={tmp_path / 'run'}"])
    assert "nor in the Hugging Face cache, and the hub says: " in problems[path]
    assert time.monotonic() - begin < 15
    assert capfd.readouterr().err == ""


def test_long_names_are_told_in_one_message(base_overrides: list[str]) -> None:
    long = "/tmp/" + "x" * 300
    keys = ("policy.model.path", "data.train_path", "data.val_path", "run_dir", "checkpointing.resume")
    problems = problems_of([*base_overrides, *(f"{key}={long}" for key in keys)])
    assert [subject.partition("=")[0] for subject in problems] == [*keys]
    assert all("too long" in text for text in problems.values())


def test_a_single_row_is_counted_as_one(base_overrides: list[str], rows: Path) -> None:
    rows.write_text(json.dumps({"prompt": "1?", "answer": "1"}) + "\n")
    text = "has 1 row, fewer than the 32 prompts of a batch; add rows or lower grpo.num_prompts_per_step"
    assert problems_of(base_overrides)[f"data.train_path={rows}"] == text


def test_tensors_that_the_model_does_not_have_are_refused(base_overrides: list[str], model: Path) -> None:
    file = model / "model.safetensors"
    tensors = {**load_file(file), "model.layers.9.extra.weight": torch.zeros(2), "rotary.inv_freq": torch.zeros(2)}
    save_file(tensors, file)
    text = problems_of(base_overrides)[f"policy.model.path={model}"]
    assert "holds 1 tensor(s) that a model of its config.json does not have" in text
    assert "model.layers.9.extra.weight;" in text


def test_a_launcher_that_starts_the_run_several_times_is_refused(
    base_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables as torchrun --nproc_per_node=2 and accelerate launch set them; one process of either is fine."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    ((subject, text),) = problems_of([*base_overrides, "cluster.gpus_per_node=0"]).items()
    assert subject == "LOCAL_RANK=1 WORLD_SIZE=2"
    assert "start it once, with python, since the run starts its own processes" in text
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "LOCAL_RANK=1 WORLD_SIZE=1" not in problems_of([*base_overrides, "cluster.gpus_per_node=0", "run_dir="])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK")  # a pod of a Kubernetes job
    assert not any("WORLD_SIZE" in key for key in problems_of([*base_overrides, "cluster.gpus_per_node=0", "run_dir="]))
