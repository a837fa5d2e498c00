"""Runs that never were, for tests of what reads a run's record: a tiny model, its later versions, and rollouts.

The engine of such a run is transformers with the weights of a folder. A test plants a defect by giving the engine
another folder, other prompts or another distribution than the record says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import Config, OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_grpo.controller.directory import record_start
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.data.rollout_files import Learnt, rollouts_file, write_rollouts
from megatron_grpo.data.trajectory import Span, Trajectory
from megatron_grpo.proof.problem import prepare_model
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.weights.families import shape_of_folder
from tests.support.recording import make_record

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
SPECIAL = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
EOS = 2
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS, SAMPLES, RESPONSE = 4, 2, 12


def add_tokenizer(folder: Path) -> None:
    """A token for each letter, and a chat template."""
    vocabulary = SPECIAL | {letter: number + len(SPECIAL) for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>", chat_template=TEMPLATE
    )
    made.save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edited_copy(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of a model whose tensors `edit` has changed, by their names in the files."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return target


def moved(source: Path, target: Path, seed: int, scale: float = 0.02) -> Path:
    """The model after a step: every number has changed a little."""

    def step(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {name: one + scale * one.std() * torch.randn(one.shape, generator=draw) for name, one in tensors.items()}

    return edited_copy(source, target, step)


@dataclass
class RecordedRun:
    """A run directory in the making."""

    root: Path
    config: Config
    versions: list[Path] = field(default_factory=list)
    """Folders of the weights of versions 0, 1, ..."""

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def prompts(self, config: Config | None = None) -> list[list[int]]:
        """Token ids of the first prompts of the data, under the run's configuration or another one."""
        loader: Any = load_prompt_data(config or self.config, self.versions[0]).loader
        return [one["message_log"][0]["token_ids"] for one in loader.prompts(range(PROMPTS))]

    def add_version(self, folder: Path | None = None) -> Path:
        """The next version, and its checkpoint; without a folder of weights, every number changes a little."""
        number = len(self.versions)
        folder = folder or moved(self.versions[-1], self.root / f"version_{number}", seed=number)
        self.versions.append(folder)
        save_checkpoint(folder, self.run_dir / f"checkpoints/step_{number}/megatron", self.config)
        return folder

    def write(self, step: int, rollouts: Sequence[Trajectory], learnt: Sequence[Learnt | None] = ()) -> None:
        """Write the record of a step."""
        self.run_dir.mkdir(exist_ok=True)
        record_start(self.run_dir, self.config)
        pairs = list(zip(rollouts, learnt or [None] * len(rollouts), strict=True))
        groups = [(number, pairs[number * SAMPLES : (number + 1) * SAMPLES]) for number in range(PROMPTS)]
        write_rollouts(rollouts_file(self.run_dir, step), groups, make_record().metadata())


def make_run(root: Path, model_of: str | Path, *overrides: str, **model_config: Any) -> RecordedRun:
    """A run at its start.

    Args:
        root: folder for everything.
        model_of: a family, for a tiny model of it, or the folder of a model.
        overrides: changes of the configuration, each section.key=VALUE.
        model_config: changes of the model's config.json.
    """
    if isinstance(model_of, Path):
        model = Path(shutil.copytree(model_of, root / "version_0"))
    else:
        model = prepare_model(f"tiny:{model_of}", False, root / "version_0", seed=1)
    edit_config(model, **model_config)
    add_tokenizer(model)
    data = root / "train.jsonl"
    words = ("add one and two", "what is left", "say it again", "count to four")
    data.write_text("".join(json.dumps({"prompt": word, "answer": "1"}) + "\n" for word in words))
    given = [
        "+exp=quickstart",
        f"run_dir={root / 'run'}",
        f"policy.model.path={model}",
        f"data.train_path={data}",
        "data.val_path=null",
        "prepare.name=null",
        "data.apply_chat_template=true",
        "data.task_name=addition",
        "data.max_input_seq_length=96",
        "policy.max_total_sequence_length=128",
        f"grpo.num_prompts_per_step={PROMPTS}",
        f"grpo.num_generations_per_prompt={SAMPLES}",
        *overrides,
    ]
    composed = compose_typed(given)
    assert composed.config is not None, composed.problems
    assert not composed.problems
    return RecordedRun(root, composed.config, [model])


def save_checkpoint(folder: Path, target: Path, config: Config) -> None:
    """The weights of a folder as a checkpoint of the policy."""
    policy = PolicyConfig(precision=config.policy.precision, optimizer=OptimizerConfig(distributed=False))
    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=0, timeout_s=60)
    try:
        shape = shape_of_folder(folder)
        rank = PolicyRank(RankSettings(config=policy, shape=shape, folder=str(folder), decay_steps=1))
        target.mkdir(parents=True)
        rank.checkpoint.save(str(target))
    finally:
        destroy_parallel()


@torch.no_grad()
def sampled(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    version: int = 0,
    temperature: float = 1.0,
    reported: float | None = None,
    recorded: Sequence[Sequence[int]] | None = None,
    prepare: Callable[[Any], object] = lambda model: None,
    dtype: torch.dtype = torch.float32,
    choose: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> list[Trajectory]:
    """Rollouts that transformers samples with the weights of a folder.

    Args:
        folder: the engine's weights.
        prompts: token ids of each prompt, as the engine sees them.
        version: weight version that the record names.
        temperature: temperature of the samples.
        reported: temperature of the reported log-probabilities; None: that of the samples.
        recorded: prompts that the record has instead of those that the engine saw.
        prepare: changes the engine's model.
        dtype: type of the engine's weights and activations.
        choose: changes logits, [vocabulary], float32, before the softmax.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prepare(model)
    draw = torch.Generator().manual_seed(7)
    found = []
    for row, prompt in enumerate(prompts):
        for sample in range(SAMPLES):
            ids, logprobs = list(prompt), []
            for _ in range(RESPONSE):
                logits = model(torch.tensor([ids])).logits[0, -1].float()
                probabilities = choose(logits / temperature).softmax(-1)
                token = int(torch.multinomial(probabilities, 1, generator=draw))
                logprobs.append(float(choose(logits / (reported or temperature)).log_softmax(-1)[token]))
                ids.append(token)
                if token == EOS:
                    break
            found.append(rollout(row, sample, (recorded or prompts)[row], ids[len(prompt) :], logprobs, version))
    return found


def rollout(
    row: int, sample: int, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], version: int
) -> Trajectory:
    """The record of one response to the prompt of a row."""
    whole = [*prompt, *response]
    return Trajectory(
        prompt_idx=row,
        group=row,
        sample=sample,
        task_name="addition",
        token_ids=np.array(whole, dtype=np.int32),
        spans=[Span(len(prompt), len(whole), version)],
        logprobs=np.array(logprobs, dtype=np.float32),
        response="",
        stop_reason="stop" if response[-1] == EOS else "length",
    )
