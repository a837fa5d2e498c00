"""The train command: help, the resolved configuration, exit codes and what is printed where."""

import importlib.util
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import megatron_grpo.__main__ as overview
from megatron_grpo import command, doctor, evaluate, export, plan, refit_plan, replay, report, verify
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.help import COMMANDS
from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import load_config
from megatron_grpo.run.directory import lock_run_directory, record_start
from tests.support.checkpoints import MODELS, save


def put_loop_in_place(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None, also: Callable[[], None] = lambda: None
) -> list[Config]:
    """Replaces the training loop by one that only records its configuration, or fails."""
    started: list[Config] = []

    def train_with_restarts(config: Config, _: object, train: Callable[[Any], None]) -> None:
        started.append(config)
        train(None)

    def grpo_train(_: object) -> None:
        also()
        if error is not None:
            raise error

    startup = SimpleNamespace(part=lambda _: nullcontext())
    made_up = {
        "algorithms.grpo": {"grpo_train": grpo_train},
        "algorithms.restarts": {"train_with_restarts": train_with_restarts},
        "run.lifetime": {"open_run": lambda *_: nullcontext(startup)},
    }
    for name, functions in made_up.items():
        module = ModuleType(f"megatron_grpo.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return started


def with_note(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


def test_help_fits_a_screen_and_says_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for word in ("--help PATTERN", "quickstart_dpo", "variant", "policy.model.path", "--help recipes", "--help groups"):
        assert word in "\n".join(lines)


@pytest.mark.parametrize("program", [command, overview, evaluate, plan], ids=lambda module: module.__name__)
def test_help_with_a_word_names_every_recipe_and_group(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for word, listed in (("recipes", ["exp"]), ("groups", [name for name in list_config_groups() if name != "exp"])):
        assert program.main(["--help", word]) == 0
        words = set(re.split(r"[\s,]+", capsys.readouterr().out))
        for group in listed:
            assert {*list_config_groups()[group]} <= words
            assert group == "exp" or group in words


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("lr", ["policy.optimizer.lr (float > 0, by default 1e-06)", "Peak learning rate."]),
        ("policy.optimizer.lr", ["policy.optimizer.lr (float"]),
        ("policy.optimizer.lr=3e-6", ["policy.optimizer.lr (float"]),
        ("LORA", ["policy.lora.rank (int >= 0, by default 0)", "refit.adapters"]),
        ("learning_rate", ["TRL's learning_rate is policy.optimizer.lr here", "Peak learning rate."]),
        ("model.path", ["policy.model.path (required, text)"]),
        ("dapo", ["variant\n      dapo\n", "grpo.use_dynamic_sampling"]),
        ("+exp=quickstart_dpo", ["quickstart_dpo\n      The quickstart with pairs"]),
        ("num_promts_per_step", ["did you mean grpo.num_prompts_per_step"]),
        ("zzzz", ["no key, recipe or group matches zzzz;\ndocs/configuration.md has every key"]),
    ],
)
def test_help_searches_keys_recipes_and_groups(
    pattern: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--help", pattern]) == 0
    out = capsys.readouterr().out
    for text in texts:
        assert text in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_search_for_help_finds_words_and_not_their_insides(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help", "lr"]) == 0
    assert "processor" not in capsys.readouterr().out  # whose text has "already"


def test_help_imports_neither_torch_nor_ray() -> None:
    """In a process of its own, which has imported nothing else."""
    code = f"""if True:
        import importlib, sys
        for name in {[*(COMMANDS.keys() - {"launch"}), "launch.__main__", "__main__"]!r}:
            assert importlib.import_module(f"megatron_grpo.{{name}}").main(["--help"]) in (0, None)
            assert importlib.import_module(f"megatron_grpo.{{name}}").main(["--help", "lr"]) in (0, None)
        print(sorted({{"torch", "ray", "vllm", "transformers", "megatron.core"}} & set(sys.modules)))
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("option", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_the_resolved_configuration(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["+exp=quickstart", "grpo.max_num_steps=3", *option]) == 0
    captured = capsys.readouterr()
    configuration = yaml.safe_load(captured.out)
    assert configuration["grpo"]["max_num_steps"] == 3
    assert configuration["grpo"]["use_leave_one_out_baseline"] is True
    assert configuration["policy"]["model"]["path"].endswith("/model")
    assert "${" not in str(configuration)
    assert captured.err == ""


def test_cfg_prints_and_says_when_files_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["+exp=quickstart", "data.train_path=/nowhere.jsonl", "--cfg", "job"]) == 2
    captured = capsys.readouterr()
    assert yaml.safe_load(captured.out)["data"]["train_path"] == "/nowhere.jsonl"
    assert "data.train_path=/nowhere.jsonl  no such file" in captured.err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["+exp=qwen3_8b_8gpu", "--cfg", "job"]) == 2
    captured = capsys.readouterr()
    assert yaml.safe_load(captured.out)["policy"]["model"]["path"] == "Qwen/Qwen3-8B"
    assert "this machine has no CUDA GPU" in captured.err


def test_cfg_shows_what_was_given_also_where_it_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cfg", "job", "grpo.max_num_steps=0", "nope=3"]) == 2
    captured = capsys.readouterr()
    configuration = yaml.safe_load(captured.out)
    assert configuration["data"]["train_path"] == "???"
    assert configuration["grpo"]["max_num_steps"] == 0
    for text in ("data.train_path       is required", "nope ", "grpo.max_num_steps=0  must be int > 0"):
        assert text in captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["+exp=quickstart", "grpo.max_num_step=3"], "did you mean grpo.max_num_steps?"),
        (["--info"], "no such option; --cfg job prints the configuration, --check says what would run"),
        (["--check", "+exp=quickstart", "grpo.max_num_step=3"], "did you mean grpo.max_num_steps?"),
        (["quickstart"], "did you mean +exp=quickstart?"),
        (["+exp=dpo"], "exp=dpo  no such recipe; did you mean quickstart_dpo? there is deepseek_v3_64nodes"),
        (["--cfg", "hydra"], "--cfg job"),
        (["--multirun"], "no such option"),
        (
            ["--learning_rate", "1e-6"],
            "--learning_rate  no such option; TRL's learning_rate is policy.optimizer.lr",
        ),
        (["--learning-rate=1e-6"], "no such option; TRL's learning_rate is policy.optimizer.lr here"),
        (["--policy.megatron_cfg.enabled", "true"], "no such option; leave it out, since Megatron-Core trains every"),
        (["--grpo.max_num_steps=3"], "no such option; keys have no dashes before them: grpo.max_num_steps=..."),
        (["--num_processes", "8", "--check"], "no such option; leave it out, since the run starts its own processes"),
        ([], "policy.model.path  is required"),
    ],
)
def test_a_mistake_exits_with_2_before_anything_starts(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = put_loop_in_place(monkeypatch)
    assert command.main(arguments) == 2
    captured = capsys.readouterr()
    assert started == []
    assert captured.out == ""
    assert text in captured.err
    assert "Traceback" not in captured.err


def test_all_options_of_another_command_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The form of trl grpo: names with dashes, each value a word of its own."""
    line = "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/tldr --use_vllm --output_dir run"
    assert command.main(line.split()) == 2
    problems = capsys.readouterr().err.splitlines()
    assert problems[0] == "configuration has 4 problems:"
    assert [line.split()[0] for line in problems[1:]] == [word for word in line.split() if word.startswith("--")]


def test_the_quickstart_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    started = put_loop_in_place(monkeypatch)
    assert command.main(["+exp=quickstart", "grpo.max_num_steps=3", "policy.parallel.tensor=2"]) == 0
    (config,) = started
    assert config.grpo.max_num_steps == 3
    assert (config.policy.parallel.tensor, config.policy.parallel.pipeline) == (2, 2)
    assert config.generation.parallel.pipeline == 2


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RunError("engine 0 died"), 1, "run failed: engine 0 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            with_note(KeyboardInterrupt("SIGTERM"), "step_4 is the last one"),
            143,
            "interrupted; step_4 is the last one\n",
        ),
    ],
)
def test_a_failed_run_prints_one_line(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_loop_in_place(monkeypatch, error)
    assert command.main(["+exp=quickstart"]) == code
    assert capsys.readouterr().err == text


def test_check_says_what_would_run_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = put_loop_in_place(monkeypatch)
    run_dir = tmp_path / "outputs" / "run"
    assert command.main(["+exp=quickstart", "--check", f"run_dir={run_dir}"]) == 0
    assert capsys.readouterr().out == (
        "configuration is fine: quickstart, GRPO, up to 400 steps of 32 prompts x 8 samples; policy on 2 ranks (PP2), "
        f"1 engine of 2 ranks, on CPU; begins in {run_dir}\n"
    )
    assert started == []
    assert list(tmp_path.iterdir()) == [], "no folder is left behind"
    save(run_dir, 12, models=MODELS)
    assert command.main(["+exp=quickstart_ppo", "--check", f"run_dir={run_dir}"]) == 0
    out = capsys.readouterr().out
    assert "PPO, up to 400 steps of 256 prompts x 1 samples; policy on 2 ranks (PP2), value model on 1 rank, " in out
    assert out.endswith(f"goes on after step 12 in {run_dir}\n")


FUNCTIONS = ["+exp=quickstart", "env.addition.type=reward_functions", "checkpointing=none", "--check"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("nowhere.at_all", "cannot be imported: ModuleNotFoundError"),
        ("tests.unit.broken_rewards.anything", "cannot be imported: "),
        ("os.getcwd", "must take prompts and completions by name"),
    ],
)
def test_check_imports_the_reward_functions(function: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*FUNCTIONS, f"env.addition.reward_funcs=[{function}]"]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "configuration is fine" not in captured.out
    assert command.main([*FUNCTIONS, "env.addition.reward_funcs=[tests.integration.example_rewards.right]"]) == 0


@pytest.mark.parametrize(("longest", "code"), [(2, 2), (3, 0)])
def test_check_renders_the_prompts(
    longest: int, code: int, base_overrides: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = Tokenizer(WordLevel({"?": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Split("", "isolated")  # a token a character
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(model)
    lengths = [f"data.max_input_seq_length={longest}", "data.apply_chat_template=false", "checkpointing=none"]
    assert command.main([*base_overrides, *lengths, "--check"]) == code
    captured = capsys.readouterr()
    if code:
        assert "has 10 usable rows, fewer than the 32 prompts of a batch" in captured.err
        assert "left out: more than data.max_input_seq_length=2 tokens in the prompt" in captured.err
    else:
        assert "configuration is fine" in captured.out


def test_check_compares_the_adapters_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 12)
    arguments = ["+exp=quickstart", f"run_dir={tmp_path}", "--check"]
    record_start(tmp_path, load_config(arguments[:2]))
    assert command.main(arguments) == 0
    assert command.main([*arguments, "policy.lora.rank=8"]) == 2
    assert (
        f"{tmp_path}/checkpoints/step_12 was written with policy.lora.rank=0, and this run has policy.lora.rank=8, "
        "alpha=32, target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
    ) in capsys.readouterr().err


def test_check_sees_that_another_run_holds_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run_directory(str(tmp_path)):
        for option in ([], ["--check"]):
            assert command.main(["+exp=quickstart", f"run_dir={tmp_path}", *option]) == 2
    assert "is in use by another run that is still alive" in capsys.readouterr().err


def test_remarks_come_before_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    put_loop_in_place(monkeypatch, also=lambda: calls.append(capsys.readouterr().out))
    overrides = ["+exp=quickstart", "generation.temperature=0", "grpo.early_stop.threshold=0.9"]
    assert command.main(overrides) == 0
    (before,) = calls
    assert "generation.temperature=0 is greedy" in before
    assert "grpo.early_stop.threshold=0.9 changes nothing in this run: needs grpo.early_stop.enabled=true" in before
    assert command.main([*overrides, "--check"]) == 0
    assert "generation.temperature=0 is greedy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "subjects"),
    [
        ([], []),
        (["grpo.val_period=7"], ["grpo.val_period=7"]),
        (["ppo.val_period=7"], ["ppo.val_period=7"]),  # another name of the same key
        (["variant=dapo"], ["loss_fn.ratio_clip_max=0.28"]),
        (["data={shuffle_buffer: 3}"], ["data.shuffle_buffer=3"]),
    ],
)
def test_keys_of_a_recipe_that_change_nothing_are_not_remarked_on(
    overrides: list[str], subjects: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe sets the period, the size and the rows of a validation, and the command line removes its set."""
    removed = ["+exp=quickstart", "data.val_path=null", "checkpointing=none"]
    assert command.main([*removed, *overrides, "--check"]) == 0
    remarks = re.findall(r"^(\S+) .*changes nothing in this run", capsys.readouterr().out, flags=re.MULTILINE)
    assert [remark for remark in remarks if "val" in remark or "val" not in str(subjects)] == subjects


def test_keys_of_a_recipe_of_ones_own_are_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "exp").mkdir()
    recipe = "# @package _global_\ndefaults: [/exp/quickstart, _self_]\ndata: {shuffle_buffer: 3}\n"
    (tmp_path / "exp" / "mine.yaml").write_text(recipe)
    assert command.main([f"--config-dir={tmp_path}", "+exp=mine", "--check"]) == 0
    assert "data.shuffle_buffer=3 changes nothing in this run: needs data.streaming=true" in capsys.readouterr().out


def test_the_version_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for module in (command, overview, doctor, evaluate, export, plan, refit_plan, replay, report, verify):
        assert module.main(["--version"]) == 0
        assert re.fullmatch(r"megatron_grpo \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert overview.main([]) == overview.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command_name in COMMANDS:
        assert f"python -m megatron_grpo.{command_name} " in out
        assert importlib.util.find_spec(f"megatron_grpo.{command_name}")
    assert overview.main(["trian", "+exp=quickstart"]) == 2
    assert "did you mean python -m megatron_grpo.train?" in capsys.readouterr().err


def test_a_mistake_is_answered_within_a_second_of_work() -> None:
    """In a process of its own, imports included; seconds of CPU, which other processes do not add to."""
    command = [sys.executable, "-m", "megatron_grpo.train", "+exp=quickstart", "grpo.max_num_step=3", "learning_rate=1"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 2
    assert "TRL's learning_rate is policy.optimizer.lr here" in process.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_the_documented_name_is_a_function() -> None:
    """In a process of its own: importing the module of the command would take its name."""
    code = "import megatron_grpo; megatron_grpo.train(['+exp=quickstart', 'grpo.max_num_step=3'])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "did you mean grpo.max_num_steps?" in process.stderr
