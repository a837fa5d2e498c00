"""A tiny vision model that counts some squares right, trained in transformers before the run."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.models.source import COUNTING_VOCABULARY, EOS, IMAGE_MARKS, PAD, PREPARED_MODELS
from megatron_grpo.prepare.character_tokenizer import make_tokenizer
from megatron_grpo.prepare.lessons import RECIPES, Lesson, split_lessons

# Images stand where their parts do; an answer ends with <eos>.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}={%- endif -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- if message.role == 'assistant' -%}<eos>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}={%- endif -%}"""


def make_counting_model(folder: Path) -> dict[str, float]:
    """Train and save the model; returns its greedy accuracy by folder."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    recipe, (warmup, unseen, val) = RECIPES["counting"], split_lessons("counting")
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(recipe["seed"])
    try:
        config = AutoConfig.for_model(**PREPARED_MODELS["counting"])
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        processor = make_processor()
        _warm_up(model, processor, warmup, unseen[: recipe["probe_problems"]])
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        token_ids = {"eos_token_id": COUNTING_VOCABULARY[EOS], "pad_token_id": COUNTING_VOCABULARY[PAD]}
        generation = {"do_sample": True, "temperature": 1.0, **token_ids}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        return {folder.name: float(score_answers(model, processor, val)[1].float().mean())}
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


def make_processor() -> Any:
    """Make the model's processor, with a tokenizer of characters and marks."""
    from tokenizers import AddedToken
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    text, vision = (PREPARED_MODELS["counting"][part] for part in ("text_config", "vision_config"))
    tokenizer = make_tokenizer(COUNTING_VOCABULARY, text["max_position_embeddings"])
    marks = [AddedToken(mark, special=True) for mark in IMAGE_MARKS]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "size": {"shortest_edge": 64, "longest_edge": 4096},  # pixels of a picture
    }
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=TEMPLATE,
    )


def _warm_up(model: Any, processor: Any, lessons: Sequence[Lesson], probe: Sequence[Lesson]) -> None:
    """Train until the probe's answers have the target probability."""
    import torch

    recipe, order = RECIPES["counting"], torch.Generator().manual_seed(RECIPES["counting"]["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(recipe["warmup_steps_max"]):
        optimizer.param_groups[0]["lr"] = recipe["lr"] * min(1.0, (step + 1) / recipe["warmup_lr_ramp_steps"])
        chosen = torch.randint(len(lessons), (recipe["warmup_batch_problems"],), generator=order).tolist()
        loss = -_compute_logprobs(model, processor, [lessons[index] for index in chosen])[0].sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        is_probed = step >= recipe["probe_from_step"] and step % recipe["probe_period_steps"] == 0
        if is_probed and float(score_answers(model, processor, probe)[0].exp().mean()) >= recipe["target_reward"]:
            break


def score_answers(model: Any, processor: Any, lessons: Sequence[Lesson]) -> tuple[Any, Any]:
    """Compute log-probabilities of lessons' answers, [lessons], and whether greedy sampling writes them."""
    import torch

    with torch.no_grad():
        logprobs, is_likeliest = _compute_logprobs(model, processor, lessons)
    return logprobs.sum(dim=1), is_likeliest.all(dim=1)


def _compute_logprobs(model: Any, processor: Any, lessons: Sequence[Lesson]) -> tuple[Any, Any]:
    """Compute log-probabilities of answers' tokens, and whether each is the likeliest.

    Both are [lessons, 2].
    """
    from PIL import Image

    texts = []
    for lesson in lessons:
        content = [{"type": "image"}, {"type": "text", "text": lesson.row["prompt"]}]
        messages = [{"role": "user", "content": content}]
        texts.append(processor.apply_chat_template(messages, add_generation_prompt=True) + lesson.row["answer"] + EOS)
    images = [Image.open(io.BytesIO(b64decode(lesson.row["image"].partition(",")[2]))) for lesson in lessons]
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="left")
    logits = model(**inputs, use_cache=False).logits[:, -3:-1].log_softmax(dim=-1)
    targets = inputs["input_ids"][:, -2:]  # a digit and the end
    return logits.gather(-1, targets[..., None])[..., 0], logits.argmax(dim=-1) == targets
