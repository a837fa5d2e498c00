"""Dry runs: the tracked memory is the same on fake and on real tensors, and what arithmetic says it is."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_grpo.config.policy_schema import RecomputeModule
from megatron_grpo.config.schema import Config, LoraConfig, ParallelConfig
from megatron_grpo.models.families import exchange_head, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.heads import VALUE
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.dry.tracker import GRANULE, MemoryTracker
from megatron_grpo.planning.dry_run import list_phases, run_dry, run_tracked
from tests.support.config_problems import SMALL

DENSE = parse_model_shape({**SMALL, "model_type": "qwen3", "vocab_size": 256, "num_hidden_layers": 4})
EXPERTS = parse_model_shape(
    {
        **SMALL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
OSS = parse_model_shape(
    {
        **SMALL,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 256,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 150000.0,
        "intermediate_size": 32,
        "head_dim": 64,
    }
)

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a dry run takes the process's GPU away from Megatron-Core"
)
pytestmark = needs_no_gpu


def small_run(**parallel: int | bool) -> Config:
    config = Config()
    config.policy.parallel = ParallelConfig(**parallel)
    config.policy.max_total_sequence_length, config.policy.microbatch_tokens = 64, 128
    config.loss_fn.reference_policy_kl_penalty = 0.0
    return config


def use_lora(config: Config) -> None:
    config.policy.lora = LoraConfig(rank=4)


def use_reference(config: Config) -> None:
    config.loss_fn.reference_policy_kl_penalty = 0.1


def recompute(config: Config) -> None:
    config.policy.activation_checkpointing = True


def recompute_mlp(config: Config) -> None:
    config.policy.recompute_modules = ["mlp"]


def recompute_experts(config: Config) -> None:
    config.policy.recompute_modules = ["moe"]


def use_padding(config: Config) -> None:
    config.policy.packing = False


def without_overlap(config: Config) -> None:
    config.policy.overlap_grad_reduce = False


def keep_settings(config: Config) -> None:
    pass


def use_unfused_permutation(config: Config) -> None:
    """The fused one keeps indices on a GPU, of which real tensors have none."""
    config.policy.megatron = {"moe_permute_fusion": False}


def use_teacher(config: Config) -> None:
    """A teacher of 0.6 billion parameters, of which ranks hold the first rows of the head."""
    config.algorithm = "distillation"
    config.teacher.model.path = "tests/data/hf_configs/qwen3_0_6b"


def use_likeliest_tokens(config: Config) -> None:
    use_teacher(config)
    config.distillation.topk_logits_k = 16


def use_muon(config: Config) -> None:
    use_unfused_permutation(config)
    config.policy.optimizer.name = "muon"


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("shape", "parallel", "rank", "change"),
    [
        pytest.param(DENSE, {}, 0, keep_settings, id="dense"),
        pytest.param(DENSE, {}, 0, use_lora, id="lora"),
        pytest.param(DENSE, {"data": 2}, 1, use_reference, id="reference"),
        pytest.param(DENSE, {}, 0, recompute, id="recompute"),
        pytest.param(DENSE, {"tensor": 2}, 1, use_teacher, id="teacher"),
        pytest.param(DENSE, {}, 0, use_likeliest_tokens, id="likeliest_tokens"),
        pytest.param(DENSE, {}, 0, recompute_mlp, id="recompute_mlp"),
        pytest.param(DENSE, {}, 0, use_padding, id="padded"),
        pytest.param(DENSE, {"tensor": 2, "sequence": True, "data": 2}, 3, keep_settings, id="tensor"),
        pytest.param(DENSE, {"data": 2}, 0, without_overlap, id="without_overlap"),
        pytest.param(DENSE, {"context": 2}, 1, keep_settings, id="context"),
        *(pytest.param(DENSE, {"pipeline": 2}, rank, keep_settings, id=f"pipeline{rank}") for rank in (0, 1)),
        *(
            pytest.param(DENSE, {"pipeline": 2, "virtual_pipeline": 2}, rank, keep_settings, id=f"virtual{rank}")
            for rank in (0, 1)
        ),
        pytest.param(EXPERTS, {"expert": 2, "data": 2}, 1, use_unfused_permutation, id="experts"),
        pytest.param(
            OSS, {"tensor": 2, "sequence": True, "expert": 2}, 1, use_unfused_permutation, id="biases_and_sinks"
        ),
        pytest.param(EXPERTS, {"tensor": 2, "sequence": True, "expert": 2, "data": 2}, 1, use_muon, id="muon"),
        pytest.param(
            EXPERTS,
            {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2, "data": 2},
            1,
            use_unfused_permutation,
            id="expert_tensor",
        ),
    ],
)
def test_fake_tensors_take_as_much_as_real_ones(
    shape: ModelShape, parallel: dict[str, int | bool], rank: int, change: Callable[[Config], None]
) -> None:
    config = small_run(**parallel)
    change(config)
    fake, tracked = run_dry(config, shape, rank), run_tracked(config, shape, rank, fake=None)
    assert tracked.peak_bytes > 2**18
    # Some scalars are in reference cycles, and live until the garbage collector happens to run.
    close = partial(pytest.approx, abs=8 * GRANULE)
    assert tracked.peak_bytes == max(tracked.phases.values())
    assert {phase: fake.phases[phase] for phase in tracked.phases} == close(tracked.phases)
    assert {phase: fake.end_bytes[phase] for phase in tracked.end_bytes} == close(tracked.end_bytes)


@pytest.mark.turns(3)
@pytest.mark.parametrize("change", [use_teacher, use_likeliest_tokens])
def test_a_teacher_takes_its_weights_and_what_a_pass_takes(change: Callable[[Config], None]) -> None:
    config = small_run(tensor=2)
    change(config)
    fake, tracked = (run_dry(config, DENSE, 0, is_teacher=True), run_tracked(config, DENSE, 0, None, is_teacher=True))
    assert fake.phases == pytest.approx(tracked.phases, abs=8 * GRANULE)
    assert fake.phases.keys() == {"build", "teacher"}
    # In bfloat16, half of each matrix; norms are whole, and each tensor fills granules.
    halves = sum(torch.Size(sizes).numel() for sizes in measure_tensors(DENSE).values())
    assert halves < fake.end_bytes["teacher"] < 1.2 * halves
    states = 128 * (DENSE.hidden * 2 if change is use_teacher else 33 * 4)
    assert fake.phases["teacher"] > fake.end_bytes["build"] + states


@pytest.mark.slow
@pytest.mark.parametrize("change", [recompute, recompute_experts])
def test_a_step_leaves_nothing_of_recomputed_experts(change: Callable[[Config], None]) -> None:
    config = small_run()
    change(config)
    report = run_dry(config, EXPERTS, 0)
    assert report.end_bytes["train"] <= report.end_bytes["logprobs"] + 8 * GRANULE


@pytest.mark.turns(3)
@pytest.mark.parametrize("modules", [["layernorm"], ["moe_act"], ["layernorm", "moe_act"]], ids=str)
def test_parts_that_transformer_engine_recomputes_take_less_memory(modules: list[RecomputeModule]) -> None:
    """A plan of them needs neither a GPU nor the package."""
    peaks = []
    for chosen in ([], modules):
        config = small_run()
        config.policy.microbatch_tokens, config.policy.recompute_modules = 8192, chosen
        peaks.append(run_dry(config, EXPERTS, 0).phases["train"])
    assert peaks[0] - peaks[1] >= 8192 * 2 * EXPERTS.hidden, "the outputs of one part, in bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True, "data": 2}], ids=["one rank", "tensor"])
def test_a_filter_of_sampling_takes_the_memory_of_the_chunked_kernel(parallel: dict[str, int | bool]) -> None:
    config, chunked = small_run(**parallel), small_run(**parallel)
    config.generation.top_p = 0.9
    chunked.policy.logprob_kernel = "chunked"
    assert run_dry(config, DENSE, 0).phases == run_dry(chunked, DENSE, 0).phases


@pytest.mark.slow
def test_routers_choose_where_a_run_replays_the_engines_choice() -> None:
    config = small_run(expert=2, data=2)
    own_choice = run_dry(config, EXPERTS, 0)
    config.policy.moe.replay_routing = True
    assert run_dry(config, EXPERTS, 0).phases == own_choice.phases


@pytest.mark.turns(3)
def test_a_reference_on_the_host_takes_no_memory_between_its_turns() -> None:
    config = small_run()
    alone = run_dry(config, DENSE, 0)
    use_reference(config)
    config.reference.offload = True
    report = run_dry(config, DENSE, 0)
    assert report.end_bytes["build"] == pytest.approx(alone.end_bytes["build"], abs=8 * GRANULE)
    assert report.phases["reference"] >= alone.phases["logprobs"] + sum(weight_bytes(DENSE))


def weight_bytes(shape: ModelShape) -> list[int]:
    """Bytes of the layers' matrices, in bfloat16."""
    heads = (shape.attention_heads + 2 * shape.key_value_heads) * shape.head_dim
    matrices = [
        shape.hidden * heads,
        shape.attention_heads * shape.head_dim * shape.hidden,
        3 * shape.hidden * shape.ffn_hidden,
    ]
    return [2 * numbers for numbers in matrices] * shape.layers


def test_phases_are_those_that_the_run_has() -> None:
    config = small_run()
    assert list_phases(config) == {"train", "refit", "checkpoint"}
    config.loss_fn.reference_policy_kl_penalty, config.checkpointing.enabled = 0.1, False
    assert list_phases(config) == {"train", "refit", "reference"}
    config.policy.train_global_batch_samples, config.generation.placement = 8, "colocated"
    assert list_phases(config) == {"train", "refit", "reference", "logprobs", "offload", "onload"}
    config.debug.rollouts_from = "run"
    assert list_phases(config) == {"train", "reference", "logprobs"}


def test_phases_that_a_run_lacks_are_not_run() -> None:
    config = small_run()
    report = run_dry(config, DENSE, 0, phases=list_phases(config))
    assert report.phases.keys() - {"build", "first step"} == {"train", "refit", "checkpoint"}


@pytest.mark.turns(3)
def test_a_value_model_runs_dry_without_a_reference() -> None:
    config = small_run()
    use_reference(config)
    report = run_dry(config, exchange_head(DENSE, VALUE), 0, moves=False)
    assert report.phases.keys() - {"build", "first step"} == {"values", "train"}
    policy = run_dry(config, DENSE, 0, moves=False)
    assert report.end_bytes["train"] < policy.end_bytes["train"]


def test_the_way_to_the_host_has_no_moments() -> None:
    """They would depend on which storage goes first, and so would what is extrapolated from two runs."""
    with MemoryTracker() as tracker:
        with tracker.phase("build"):
            tensors = [torch.empty(size) for size in (1000, 50_000, 2000)]
            tracker.discount(tensors)
        with tracker.phase("reference"):
            tracker.count_again(tensors)
            result = torch.zeros(7000)
            tracker.discount(tensors)
    total, size = (sum(-(-tensor.nbytes // GRANULE) * GRANULE for tensor in part) for part in (tensors, [result]))
    moments = {key: sum(moment.values()) for key, moment in tracker.moments.items() if key[0] == "reference"}
    assert set(moments.values()) == {0, total, total + size}
    assert tracker.end_bytes["reference"] == size
