"""A Qwen3 with random weights and a vocabulary of words, and runs that train it."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PROMPT_WORDS = 16
SAMPLES = 8
WORDS = 8192
EOS, PAD = "<eos>", "<pad>"


def make_model(folder: Path, words: int = WORDS, hidden: int = 384, layers: int = 8) -> Path:
    """Write model and tokenizer in Hugging Face format, float32.

    Every token is about as probable as any other, and one of them ends a response. So lengths are geometric: nearly all
    responses to a model with thousands of words reach a limit of 128 tokens, and those to one with few have a long
    tail.

    Args:
        folder: where.
        words: size of the vocabulary.
        hidden: size of a token's state, a multiple of 128.
        layers: transformer layers of the model.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    vocabulary = {PAD: 0, EOS: 1} | {f"w{number}": number for number in range(2, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    config = Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def prompts(number: int, words: int = WORDS) -> list[str]:
    """Different prompts of PROMPT_WORDS words, a token each; the same ones each time."""
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(2, words)}" for _ in range(PROMPT_WORDS)) for _ in range(number)]


def write_data(file: Path, number: int, words: int = WORDS) -> Path:
    """Prompts as a run reads them; the answers, which nobody can know, are words too."""
    rows = ({"prompt": prompt, "answer": prompt.split()[0]} for prompt in prompts(number, words))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def even_words(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of a completion's words whose number is even."""
    texts = [completion.split() for completion in completions]
    return [sum(word[-1] in "02468" for word in words) / max(1, len(words)) for words in texts]


def settings_of_a_run(folder: Path, *, words: int, tokens: int, prompts_per_step: int, steps: int) -> list[str]:
    """What the train command is given for a run on the model in `folder`/model.

    Args:
        folder: where the data and the run's folder, `folder`/run, go.
        words: size of the model's vocabulary.
        tokens: longest response.
        prompts_per_step: prompts of a step, each with 8 samples.
        steps: optimizer steps that the run makes.
    """
    data = write_data(folder / "train.jsonl", prompts_per_step * steps, words)
    return [
        f"policy.model.path={folder / 'model'}",
        "policy.precision=float32",
        f"policy.max_total_sequence_length={PROMPT_WORDS + tokens}",
        "policy.microbatch_tokens=4608",
        "policy.optimizer.lr=1e-6",
        "policy.optimizer.min_lr=1e-6",
        f"generation.max_new_tokens={tokens}",
        "generation.engine.enforce_eager=true",
        f"data.train_path={data}",
        "data.apply_chat_template=false",
        f"data.max_input_seq_length={PROMPT_WORDS}",
        "env.math.type=reward_functions",
        "env.math.reward_funcs=[small_model.even_words]",
        "loss_fn=no_kl",
        "cluster.gpus_per_node=0",
        f"grpo.num_prompts_per_step={prompts_per_step}",
        f"grpo.num_generations_per_prompt={SAMPLES}",
        f"grpo.max_num_steps={steps}",
        "checkpointing=none",
        "logger.progress=false",
        "logger.rollouts=off",
        "logger.tensorboard=false",
        f"run_dir={folder / 'run'}",
    ]


def run(command: Sequence[str]) -> None:
    """Run a process that finds the modules of this folder; SystemExit with what it printed when it fails."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise SystemExit(f"{command[1:3]} failed:\n{process.stdout}\n{process.stderr}")


def steps_of_a_run(folder: Path, warm_up: int) -> list[dict[str, Any]]:
    """What the run in `folder`/run has reported of each step but the first ones."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][warm_up:]
