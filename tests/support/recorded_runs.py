"""Runs that never were, for tests of what reads a run's record: a tiny model, its later versions, and rollouts.

The engine of such a run is transformers with the weights of a folder. A test plants a defect by giving the engine
another folder, other prompts or another distribution than the record says.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_grpo.batch.rollout_files import TrainedValues, locate_rollouts_file, write_rollouts
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import Config, OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.run.directory import record_start
from megatron_grpo.trainer.hf_export import export_checkpoint
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import prepare_model
from tests.support.recorded_run import make_record

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
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>", chat_template=TEMPLATE
    )
    fast_tokenizer.save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edited_copy(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of a model whose tensors `edit` has changed, by their names in the files."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return target


def move_weights(source: Path, target: Path, seed: int, scale: float = 0.02) -> Path:
    """The model after a step: every number has changed a little."""

    def step(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {
            name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=draw)
            for name, tensor in tensors.items()
        }

    return edited_copy(source, target, step)


@dataclass
class RecordedRun:
    """A run directory in the making."""

    root: Path
    config: Config
    versions: list[Path] = field(default_factory=list)
    """Folders of the weights of versions 0, 1, ..."""
    samples: int = SAMPLES
    """Samples of each prompt."""

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def prompts(self, config: Config | None = None) -> list[list[int]]:
        """Token ids of the first prompts of the data, under the run's configuration or another one."""
        loader: Any = load_prompt_data(config or self.config, self.versions[0]).loader
        return [prompt["message_log"][0]["token_ids"] for prompt in loader.load_prompts(range(PROMPTS))]

    def add_version(self, folder: Path | None = None) -> Path:
        """The next version, and its checkpoint; without a folder of weights, every number changes a little.

        With adapters (policy.lora), only these change, and the version's folder has them merged.
        """
        number = len(self.versions)
        if self.config.policy.lora.rank:
            self.versions.append(save_adapters(self, number))
            return self.versions[-1]
        folder = folder or move_weights(self.versions[-1], self.root / f"version_{number}", seed=number)
        self.versions.append(folder)
        save_checkpoint(folder, self.run_dir / f"checkpoints/step_{number}/megatron", self.config)
        return folder

    def write(self, step: int, rollouts: Sequence[Trajectory], learnt: Sequence[TrainedValues] = ()) -> None:
        self.run_dir.mkdir(exist_ok=True)
        record_start(self.run_dir, self.config)
        pairs = list(zip(rollouts, learnt or [{}] * len(rollouts), strict=True))
        groups = [(row, [pair for pair in pairs if pair[0].group == row]) for row in range(PROMPTS)]
        record = make_record(
            prompts_per_step=PROMPTS,
            samples_per_prompt=self.samples,
            max_num_steps=self.config.loop.max_num_steps,
            vocab=read_model_shape(self.versions[0]).vocab,
        )
        write_rollouts(locate_rollouts_file(self.run_dir, step), groups, record.to_metadata())

    def write_metrics(self, errors: Mapping[int, Mapping[str, float]]) -> None:
        """Write metrics.jsonl: the figures of each step (`consistency`), by step."""
        steps = [{"step": step, "reward": 0.5, "weight_version": float(step - 1), **errors[step]} for step in errors]
        rows = (figures | {"timing": {"total": 1.0}, "throughput": {}} for figures in steps)
        (self.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    basics = [
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
    composed = compose_typed(basics)
    assert composed.config is not None, composed.problems
    assert not composed.problems
    return RecordedRun(root, composed.config, [model])


def save_checkpoint(folder: Path, target: Path, config: Config) -> None:
    """The weights of a folder as a checkpoint of the policy."""
    with _policy_rank(folder, config) as rank:
        target.mkdir(parents=True)
        rank.checkpoint.save(str(target))


ADAPTER_SCALE = 0.01
"""Standard deviation of the numbers that a step adds to the B of every adapter."""


def save_adapters(run: RecordedRun, number: int) -> Path:
    """A checkpoint of a version whose adapters have learnt in `number` steps; the folder of its merged weights."""
    checkpoint, folder = run.run_dir / f"checkpoints/step_{number}/megatron", run.root / f"version_{number}"
    draw = torch.Generator().manual_seed(11)
    with _policy_rank(run.versions[0], run.config) as rank:
        for _ in range(number):
            for name, parameter in rank.chunks[0].named_parameters():
                if name.endswith("lora_b"):
                    parameter.data.add_(ADAPTER_SCALE * torch.randn(parameter.shape, generator=draw))
        checkpoint.mkdir(parents=True)
        rank.checkpoint.save(str(checkpoint))
    policy, shape = run.config.policy, read_model_shape(run.versions[0])
    export_checkpoint(
        checkpoint,
        run.versions[0],
        shape,
        folder,
        precision=policy.precision,
        lora=policy.lora,
        adapters_of=None,
        quantization=None,
    )
    return folder


@contextmanager
def _policy_rank(folder: Path, config: Config) -> Iterator[PolicyRank]:
    """The policy of a run with the weights of a folder, on one rank in this process."""
    precision, lora = config.policy.precision, config.policy.lora
    policy = PolicyConfig(precision=precision, lora=lora, optimizer=OptimizerConfig(distributed=False))
    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=0, timeout_s=60)
    try:
        shape = read_model_shape(folder)
        yield PolicyRank(RankSettings(config=policy, shape=shape, folder=str(folder), decay_steps=1))
    finally:
        destroy_parallel()


def last_logits(model: Any, ids: list[int], prompt: int) -> Tensor:
    """Logits of the token after `ids`, [vocabulary], float32; the prompt has the first `prompt` tokens."""
    logits: Tensor = model(torch.tensor([ids])).logits[0, -1].float()
    return logits


@torch.no_grad()
def sample_rollouts(
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
    forward: Callable[[Any, list[int], int], Tensor] = last_logits,
    samples: int = SAMPLES,
    seed: int = 7,
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
        forward: computes the logits of the next token, with the arguments of `last_logits`.
        samples: samples of each prompt.
        seed: seed of the draws.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prepare(model)
    draw = torch.Generator().manual_seed(seed)
    trajectories = []
    for row, prompt in enumerate(prompts):
        for sample in range(samples):
            ids, logprobs = list(prompt), []
            for _ in range(RESPONSE):
                logits = forward(model, ids, len(prompt))
                probabilities = choose(logits / temperature).softmax(-1)
                token = int(torch.multinomial(probabilities, 1, generator=draw))
                logprobs.append(float(choose(logits / (reported or temperature)).log_softmax(-1)[token]))
                ids.append(token)
                if token == EOS:
                    break
            trajectories.append(rollout(row, sample, (recorded or prompts)[row], ids[len(prompt) :], logprobs, version))
    return trajectories


def rollout(
    row: int, sample: int, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], version: int
) -> Trajectory:
    """The record of one response to the prompt of a row."""
    full = [*prompt, *response]
    return Trajectory(
        prompt_idx=row,
        group=row,
        sample=sample,
        task_name="addition",
        token_ids=np.array(full, dtype=np.int32),
        spans=[Span(len(prompt), len(full), version)],
        logprobs=np.array(logprobs, dtype=np.float32),
        response="",
        stop_reason="stop" if response[-1] == EOS else "length",
    )


def alone(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Logits of every sequence by itself, each [tokens, vocabulary]."""
    return [model(torch.tensor([ids])).logits[0] for ids in sequences]


@torch.no_grad()
def score_rollouts(
    folder: Path,
    rollouts: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    choose: Callable[[Tensor], Tensor] = lambda logits: logits,
    forward: Callable[[Any, list[list[int]]], list[Tensor]] = alone,
) -> list[NDArray[np.float32]]:
    """Log-probabilities that a trainer computes for rollouts, each [sampled tokens], by transformers.

    Args:
        folder: the trainer's weights.
        rollouts: the rollouts, in the order of the step.
        temperature: temperature of the log-probabilities.
        dtype: type of the trainer's weights and activations.
        choose: changes logits, [vocabulary], float32, before the softmax.
        forward: computes the logits of all sequences.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    logits = forward(model, [rollout.token_ids.tolist() for rollout in rollouts])
    arrays = []
    for rollout, row_logits in zip(rollouts, logits, strict=True):
        positions = np.concatenate([np.arange(span.start, span.end) for span in rollout.spans])
        rows = torch.stack([choose(row / temperature) for row in row_logits[positions - 1].float()])
        ids = torch.from_numpy(rollout.token_ids[positions]).long()
        arrays.append(rows.log_softmax(-1).gather(1, ids[:, None])[:, 0].numpy())
    return arrays


def consistency(rollouts: Sequence[Trajectory], trained: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """The metrics of a step that compare engine and trainer (docs/observing.md), with numpy, in float64."""
    prev = np.concatenate(list(trained)).astype(np.float64)
    generation = np.concatenate([rollout.logprobs for rollout in rollouts]).astype(np.float64)
    removed = np.isneginf(prev)  # tokens that a filter removes in training count as agreement
    log_ratio = np.where(removed, 0.0, np.clip(np.where(removed, 0.0, prev) - generation, -40, 40))
    error, ratio = np.exp(np.abs(log_ratio)), np.exp(log_ratio)
    return {
        "token_mult_prob_error": float(error.mean()),
        "token_mult_prob_error_max": float(error.max()),
        "sampling_importance_ratio": float(ratio.mean()),
        "gen_kl_error": float((ratio - 1 - log_ratio).mean()),
        "policy_kl_error": float((ratio * log_ratio - (ratio - 1)).mean()),
        "effective_sample_size": float(ratio.mean() ** 2 / (ratio**2).mean()),
        "valid_tokens": float(len(prev)),
    }
