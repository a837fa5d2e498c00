"""An exported folder keeps the tokenizer, templates and end tokens of the released layout that a run began with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from megatron_grpo.data.processors import TaskDataSpec, math_data_processor
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.models.hf_folder import write_hf_folder
from tests.support.released.layout import Layout
from tests.support.released.table import ADD, LAYOUTS, SYSTEM, TRICKY, USER

pytestmark = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
WEIGHTS = "model.safetensors"


@pytest.fixture
def exported(layout: Layout, tmp_path: Path) -> Path:
    source = layout.write(tmp_path / "source")
    if layout.template_file:  # transformers finds further templates only beside a default one in a file
        extra = source / "additional_chat_templates" / "tool_use.jinja"
        extra.parent.mkdir()
        extra.write_text("{{ 'tools: ' + tools | tojson }}")
    write_hf_folder([("model.norm.weight", torch.ones(4))], source, tmp_path / "exported")
    return tmp_path / "exported"


def test_an_export_holds_every_file(layout: Layout, exported: Path) -> None:
    source = exported.parent / "source"
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert {path.relative_to(exported) for path in exported.rglob("*") if path.is_file()} == {*files, Path(WEIGHTS)}
    for file in files - {Path("config.json")}:
        assert (exported / file).read_bytes() == (source / file).read_bytes()
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (exported, source))
    changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert changed <= {"dtype", "torch_dtype", "text_config"}
    texts = [config.get("text_config", {}) for config in (ours, theirs)]
    assert {key for key in texts[0] if texts[0][key] != texts[1].get(key)} <= {"dtype", "torch_dtype"}


def test_a_reloaded_export_gives_the_same_prompts(layout: Layout, exported: Path) -> None:
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (exported, exported.parent / "source"))
    for tools in (None, [ADD]):
        texts = [
            tokenizer.apply_chat_template([SYSTEM, USER], tools=tools, tokenize=False) for tokenizer in (ours, theirs)
        ]
        assert texts[0] == texts[1]
    shutil.rmtree(exported / "additional_chat_templates", ignore_errors=True)
    expected = layout.render([SYSTEM, USER], tools=[ADD])
    spec = TaskDataSpec(task_name="x", system_prompt=SYSTEM["content"], tools=[ADD])
    datum = math_data_processor({"prompt": TRICKY, "answer": "1"}, spec, load_tokenizer(exported), 10_000, 0)
    assert datum["message_log"][0]["token_ids"] == layout.ids(expected)
    ends = GenerationConfig.from_pretrained(exported).eos_token_id
    assert {*(ends if isinstance(ends, list) else [ends])} == layout.ends


@pytest.mark.parametrize("tools", [None, [ADD]])
def test_the_template_of_a_run_is_the_only_one_of_its_export(layout: Layout, exported: Path, tools: object) -> None:
    """A folder may have its templates in either file, and further ones for tools beside them."""
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>\u00e9\n"
    source, target = exported.parent / "source", exported.parent / "own"
    write_hf_folder([("model.norm.weight", torch.ones(4))], source, target, chat_template=template)
    text = AutoTokenizer.from_pretrained(target).apply_chat_template([USER], tools=tools, tokenize=False)
    assert text == layout.oracle.apply_chat_template([USER], chat_template=template, tokenize=False)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    assert settings.get("chat_template", template) == template
    theirs = json.loads((source / "tokenizer_config.json").read_text())
    assert {**settings, "chat_template": 0} == {**theirs, "chat_template": 0}
