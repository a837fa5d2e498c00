"""Families of models in the user's own folder: what is refused, what they read, and who imports them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, GlmConfig

from megatron_grpo import export, verify
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.paths import list_import_folders, read_family_environment
from megatron_grpo.models.families import adopt_families, list_families, measure_tensors
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.preflight.load import compose_checked, compose_config
from megatron_grpo.run.directory import load_run_config
from megatron_grpo.run.user_code import keep_user_code
from tests.support.documents import read_family_files

ROOT = Path(__file__).parents[3]
GLM = GlmConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=None,
)  # fmt: skip
CODE = read_family_files()["glm"]
READ = "read=_read,\n    tables=(INPUT_NORM, ATTENTION, QKV_BIAS, MLP_NORM, _MLP),"
FORM = "kind: parameter [axes] = tensor [axes] + tensor [axes]"
WRONG = {
    "FAMILY = 3": "is int, not a megatron_grpo.models.families.family.Family",
    "FAMILY = type('Own', (), {'name': 'own'})()": "is Own, not a megatron_grpo.models.families.family.Family",
    "import no_such_module": "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    "raise KeyError('x')": "cannot be imported: KeyError: 'x'",
    "OTHER = 3": "has no attribute 'FAMILY'",
    CODE.replace("    read=_read,\n", ""): "missing 1 required keyword-only argument: 'read'",
    CODE.replace("read=_read", "read='llama'"): "has read='llama', which must be a function",
    CODE.replace('architecture="GlmForCausalLM"', "architecture=('GlmForCausalLM',)"): "must be a text",
    CODE.replace(READ, "read=_read,\n    tables=_MLP,"): "has no tuple of texts as tables; of a single table it is",
    CODE.replace(READ, "read=_read,\n    tables=(),"): "has no tuple of texts as tables",
    CODE.replace("[hidden, ffn] = mlp.down", "[hidden, ffn] -> mlp.down"): f"not rows of the form '{FORM}'",
    CODE.replace("[hidden, ffn]", "[hidden, ffn *]"): f"has a table that is not rows of the form '{FORM}'",
    CODE.replace("dense: mlp.linear_fc2", "dens: mlp.linear_fc2"): "for layers of the kind dens; kinds are mixer,",
    CODE.replace('name="glm"', 'name="llama"'): "has name=llama, as a family of the package; choose another",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; families of the test are forgotten afterwards."""
    monkeypatch.setenv("MEGATRON_GRPO_FAMILIES", "[[], []]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_module(folder: Path, code: str) -> str:
    """Write a module under a name that no other test has, since modules are imported once."""
    name = f"family_{folder.name.replace('-', '_')}_{len(list(folder.glob('*.py')))}"
    (folder / f"{name}.py").write_text(code)
    return f"{name}:FAMILY"


def write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GLM, dtype=torch.float32).save_pretrained(folder / "glm")
    return folder / "glm"


def find_problems(*overrides: str) -> list[str]:
    return [
        f"{problem.subject}  {problem.text}" for problem in compose_checked(["+exp=quickstart", *overrides]).problems
    ]


@pytest.mark.parametrize("code", WRONG, ids=lambda code: WRONG[code][:40])
def test_a_wrong_family_is_refused_with_its_key_once(
    code: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_module(folder, code)
    (problem,) = find_problems(f"policy.model.family={path}")
    assert problem.startswith(f"policy.model.family={path}  ")
    assert WRONG[code] in problem
    assert verify.main([f"family={path}"]) == 2
    message = capsys.readouterr().err
    assert f"family={path}  " in message
    assert WRONG[code] in message
    assert not read_family_environment()


@pytest.mark.parametrize("value", ["glm", "my family:FAMILY", "my_family:", "a/b:FAMILY"])
def test_what_is_no_import_path_is_refused(value: str, folder: Path) -> None:
    (problem,) = find_problems(f"policy.model.family='{value}'")
    assert problem == f"policy.model.family={value}  must be module:NAME or null"


def test_a_family_of_another_architecture_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_module(folder, CODE)
    assert verify.main([f"family={path}", "model=tiny:qwen3", "layouts=[]"]) == 2
    text = f"family={path} reads GlmForCausalLM, and the model is of the family qwen3; leave it out"
    assert text in capsys.readouterr().err


READERS = {
    "raw['rope_thetas']": "read raised KeyError: 'rope_thetas'",
    "None": "read returned NoneType, not a ModelShape",
    "refuse": "rope_theta is not mine",
}


@pytest.mark.parametrize("result", READERS)
def test_a_reader_that_fails_is_named(result: str, folder: Path) -> None:
    code = CODE.replace("    return replace(shape", f"    return {result}\n    return replace(shape")
    code = code.replace("return refuse", "raise ValueError('rope_theta is not mine')")
    path, model = write_module(folder, code), write_model(folder)
    assert not adopt_families({"family": path}, list_import_folders())
    with pytest.raises(ValueError, match=READERS[result]) as caught:
        read_model_shape(model)
    assert str(model) in str(caught.value)


def test_a_factor_that_no_model_has_is_named(folder: Path) -> None:
    path, model = write_module(folder, CODE.replace("[hidden, ffn]", "[hidden, width]")), write_model(folder)
    assert not adopt_families({"family": path}, list_import_folders())
    with pytest.raises(ValueError, match=r"the row of mlp\.linear_fc2\.weight has the factor width; sizes are vocab"):
        read_model_shape(model)


def test_the_tensors_of_a_family_are_those_of_transformers(folder: Path) -> None:
    # The family that its reader names is another: the tables are those of the family that was given.
    path, model = (
        write_module(folder, CODE.replace('read_dense(raw, "glm"', 'read_dense(raw, "qwen3"')),
        write_model(folder),
    )
    with pytest.raises(ValueError, match="GlmForCausalLM is not supported"):
        read_model_shape(model)
    assert not adopt_families({"policy.model.family": path, "teacher.model.family": path}, list_import_folders())
    shape = read_model_shape(model)
    state = AutoModelForCausalLM.from_config(GLM).state_dict()
    assert measure_tensors(shape) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert (shape.family, shape.rotated_dim, shape.interleaved_rope) == ("glm", 4, True)
    assert not adopt_families({}, list_import_folders())
    assert "glm" not in [family.name for family in list_families()]


def test_a_process_of_the_run_has_the_family_from_its_environment(folder: Path) -> None:
    path, model = write_module(folder, CODE), write_model(folder)
    config = compose_config(["+exp=quickstart", f"policy.model.family={path}"])
    assert config.families == {"policy.model.family": path}
    code = f"from megatron_grpo.models.families.reading import read_model_shape as r; print(r({str(model)!r}).family)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "glm"


def test_a_recorded_family_is_imported_with_trust_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = folder / "imported"
    path, model = write_module(folder, f"open({str(marker)!r}, 'w').close()\n{CODE}"), write_model(folder)
    config = {"policy": {"model": {"path": str(model), "family": path}, "precision": "float32"}, "algorithm": "grpo"}
    checkpoint = folder / "run" / "checkpoints" / "step_1"
    (checkpoint / "megatron").mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(
        ConfigError, match=f"policy.model.family={path}  is recorded in .* and imports code; give trust"
    ):
        load_run_config(folder / "run", [])
    load_run_config(folder / "run", [], sections=("data.",))
    arguments = [f"checkpoint={checkpoint}", f"output={folder / 'out'}"]
    assert export.main(arguments) == 2
    assert f"policy.model.family={path}  is recorded in" in capsys.readouterr().err
    assert not marker.exists()
    load_run_config(folder / "run", [], is_trusted=True)
    assert marker.exists()
    for further in ("trust_run=true", f"policy.model.family={path}"):
        assert export.main([*arguments, further]) != 0  # there are no weights
        assert "policy.model.family" not in capsys.readouterr().err


def test_a_run_keeps_the_code_of_its_family(folder: Path) -> None:
    (folder / "sizes_of_family.py").write_text("ROTATED = 0.5\n")
    code = CODE.replace("rotated=0.5", "rotated=ROTATED").replace(
        "from typing", "from sizes_of_family import ROTATED\nfrom typing"
    )
    path = write_module(folder, code)
    keep_user_code(folder / "run", compose_config(["+exp=quickstart", f"policy.model.family={path}"]))
    names = sorted(file.name for file in (folder / "run" / "code").iterdir())
    assert names == sorted(["sizes_of_family.py", f"{path.partition(':')[0]}.py"])


def test_two_families_of_one_name_are_refused(folder: Path) -> None:
    first, second = (write_module(folder, CODE) for _ in range(2))
    (problem,) = adopt_families({"policy.model.family": first, "teacher.model.family": second}, list_import_folders())
    assert problem.text == f"has name=glm, as a family of {first}; choose another"
    assert json.loads(os.environ.get("MEGATRON_GRPO_FAMILIES", "[]")) == []
