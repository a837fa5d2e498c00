"""Generation: lengths, memory of engines, and the batch while responses end."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig, SpeculativeConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.planning.generation_batches import Room, simulate_generation
from megatron_grpo.planning.generation_cost import (
    BLOCK_TOKENS,
    Decoder,
    build_decoder,
    count_kv_bytes_per_token,
    count_state_bytes,
    make_log_normal_lengths,
    size_engine,
)
from megatron_grpo.platform.hardware import Hardware, load_hardware
from tests.support.config_problems import SMALL
from tests.support.released_configs import QWEN3_5_27B
from tests.unit.planning.test_costs import H100

DENSE = parse_model_shape({**SMALL, "model_type": "qwen3", "vocab_size": 256, "num_hidden_layers": 4})
FOLDER = "tests/data/hf_configs"


def test_log_normal_lengths_have_the_mean_and_the_spread() -> None:
    lengths = make_log_normal_lengths(1000.0, 0.5, 100_000, 10**9, prompt=100.0)
    assert lengths.responses.mean() == pytest.approx(1000, rel=2e-3)
    assert np.log(lengths.responses).std() == pytest.approx(0.5, rel=2e-3)


@pytest.mark.parametrize("mean", [300.0, 700.0, 1200.0, 1490.0])
def test_the_mean_is_that_of_the_responses_that_were_cut(mean: float) -> None:
    responses = make_log_normal_lengths(mean, 0.6, 2000, 1500, 0.0).responses
    assert responses.mean() == pytest.approx(mean, abs=1)
    assert responses.max() == 1500
    uncut = np.log(responses[responses < 1500])
    normal = np.sort(np.random.default_rng(0).normal(size=2_000_000))[: int(len(uncut) * 1000)]
    assert uncut.std() / normal.std() == pytest.approx(0.6, rel=0.05)  # below the cut the spread is as configured


def test_bytes_of_a_token_in_the_cache() -> None:
    llama = read_model_shape(f"{FOLDER}/llama3_3_70b")
    assert count_kv_bytes_per_token(llama, 80, 1, 2) == 2 * 80 * 8 * 128 * 2
    assert count_kv_bytes_per_token(llama, 80, 8, 2) == count_kv_bytes_per_token(llama, 80, 16, 2) == 2 * 80 * 128 * 2
    deepseek = read_model_shape(f"{FOLDER}/deepseek_v3")
    assert count_kv_bytes_per_token(deepseek, 61, 8, 2) == 61 * (512 + 64) * 2  # every rank has the latent vector


def test_states_of_delta_nets_take_blocks_of_every_sequence_and_other_layers_keys_and_values() -> None:
    shape = parse_model_shape(QWEN3_5_27B)
    # 48 layers of 48 heads, with matrices of 128 x 128 in float32, and 3 tokens of 10,240 channels in bfloat16.
    state = 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert count_state_bytes(shape, range(64), 1, 2) == state
    config = Config()
    config.generation.parallel = GenerationParallelConfig(tensor=2)
    size = size_engine(config, shape, load_hardware("h100"))
    assert size.weight_bytes == pytest.approx(2 * 27e9 / 2, rel=0.02)
    assert size.kv_bytes_per_token == 16 * 2 * 2 * 256 * 2
    assert size.state_blocks == -(-(state // 2) // (BLOCK_TOKENS * size.kv_bytes_per_token))
    assert size.count_sequences(1.0) == size.cache_blocks // (1 + size.state_blocks)


def test_pages_of_the_cache_are_vllms() -> None:
    cache = pytest.importorskip("vllm.v1.kv_cache_interface")
    torch = pytest.importorskip("torch")
    llama = read_model_shape(f"{FOLDER}/llama3_3_70b")
    spec = cache.FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    assert spec.page_size_bytes * 80 == BLOCK_TOKENS * count_kv_bytes_per_token(llama, 80, 4, 2)


@pytest.mark.parametrize(
    ("model", "parallel", "numbers"),
    [
        ("qwen3_8b", {}, 8.19e9),
        ("llama3_3_70b", {"tensor": 8}, 70.6e9 / 8),
        ("qwen3_30b_a3b", {"tensor": 2}, 30.5e9 / 2),
        ("qwen3_235b_a22b", {"tensor": 8, "expert": 8}, 235.1e9 / 8),
    ],
)
def test_weights_of_an_engine_are_those_of_the_model(model: str, parallel: dict[str, int], numbers: float) -> None:
    config = Config()
    config.generation.parallel = GenerationParallelConfig(**parallel)
    size = size_engine(config, read_model_shape(f"{FOLDER}/{model}"), load_hardware("h200"))
    assert size.weight_bytes == pytest.approx(2 * numbers, rel=0.02)
    sum_bytes = size.weight_bytes + size.activation_bytes + size.cache_blocks * BLOCK_TOKENS * size.kv_bytes_per_token
    assert sum_bytes == pytest.approx(0.9 * 139.8 * 2**30, rel=1e-3)


def test_a_layer_that_proposes_tokens_takes_its_share_of_memory() -> None:
    # Numbers in the released files: 684,531,386,000, of which 671,026,419,200 are the model's, and the layer's own
    # copies of embedding and head, which vLLM does not keep.
    numbers = 684_531_386_000 - 671_026_419_200 - 2 * 129280 * 7168
    config, shape = Config(), read_model_shape(f"{FOLDER}/deepseek_v3")
    config.generation.parallel = GenerationParallelConfig(tensor=16, expert=16)
    before = size_engine(config, shape, load_hardware("b200"))
    config.generation.engine.speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    after = size_engine(config, shape, load_hardware("b200"))
    assert after.weight_bytes - before.weight_bytes == pytest.approx(2 * numbers / 16, rel=0.05)
    assert after.kv_bytes_per_token / before.kv_bytes_per_token == 62 / 61


def test_an_engine_that_does_not_fit_has_no_cache() -> None:
    assert size_engine(Config(), read_model_shape(f"{FOLDER}/llama3_3_70b"), load_hardware("h100")).cache_blocks == 0


def _only(**efficiency: float) -> Hardware:
    """An H100 whose decoding steps cost nothing but bytes, and what is given."""
    nothing = {
        "decode_step_s": 0,
        "decode_layer_s": 0,
        "decode_sequence_s": 0,
        "decode_inner": 0,
        "decode_message_s": 0,
    }
    return replace(H100, efficiency=replace(H100.efficiency, **nothing | efficiency))


def test_a_decoding_step_reads_weights_and_cache_and_the_host_works_for_every_sequence() -> None:
    gpu = _only(decode_memory=1)
    decoder = Decoder(DENSE, gpu, 1, 2, 2)
    layer = DENSE.hidden * DENSE.head_dim * (2 * 8 + 2 * 4) + 3 * DENSE.hidden * DENSE.ffn_hidden
    read = 2 * (4 * layer + DENSE.hidden * DENSE.vocab) + 10 * 50 * count_kv_bytes_per_token(DENSE, 4, 1, 2)
    assert decoder.time_step(10, 50) == pytest.approx(read / gpu.memory_bytes_per_s)
    free, busy = (Decoder(DENSE, _only(decode_sequence_s=seconds), 1, 2, 2) for seconds in (0.0, 1.0))
    assert busy.time_step(7, 50) - free.time_step(7, 50) == pytest.approx(7.0)


def test_a_batch_touches_more_experts_than_a_token() -> None:
    shape = read_model_shape(f"{FOLDER}/qwen3_30b_a3b")
    decoder = build_decoder(Config(), shape, _only())
    drawn = np.random.default_rng(0)
    chosen = [
        len({int(expert) for _ in range(16) for expert in drawn.choice(128, 8, replace=False)}) for _ in range(400)
    ]
    experts, sequences = 3 * shape.hidden * 768 * 48 * 2, 16
    double = decoder._count_read_bytes(sequences) - decoder._count_read_bytes(1)
    assert double == pytest.approx((np.mean(chosen) - 8) * experts, rel=0.02)


@pytest.mark.parametrize(("tensor", "is_whole"), [(1, False), (8, False), (8, True)])
def test_thin_slices_of_experts_are_slower_than_their_bytes(tensor: int, is_whole: bool) -> None:
    shape = read_model_shape(f"{FOLDER}/qwen3_30b_a3b")
    ideal, slow = (Decoder(shape, _only(decode_inner=inner), tensor, 2, 2, is_whole) for inner in (0, 192))
    # The last of three matrices has a slice of 768 features as inner dimension, and takes as long as with 192 more.
    features = 768 if is_whole else 768 // tensor
    bytes_of_last = 48 * 128 * 768 * shape.hidden * 2 / tensor  # every expert is touched by so many tokens
    larger = slow._count_read_bytes(10_000) - ideal._count_read_bytes(10_000)
    assert larger == pytest.approx(bytes_of_last * 192 / features)


def test_engines_over_nodes_wait_for_the_network_in_every_layer() -> None:
    shape, layers = replace(DENSE, key_value_heads=1), DENSE.layers
    inside, over = (Decoder(shape, _only(), tensor, 2, 2) for tensor in (8, 32))
    tree = 14e-6 + 2 * (7 * 1.25e-6 + 2 * 8.5e-6)  # NCCL: seven more GPUs of a node, two levels of nodes
    nbytes = 3 * DENSE.hidden * 2
    messages = 2 * layers * (tree + 2 * nbytes * 31 / 32 / 400e9 - 2 * nbytes * 7 / 8 / 450e9)
    difference = over.time_step(3, 1) - inside.time_step(3, 1)
    assert difference == pytest.approx(messages, rel=1e-3)  # the slices of matrices are 2 ns smaller


@pytest.mark.parametrize(("tensor", "latency"), [(4, 8e-6), (8, 6.6e-6 + 14 * 0.6e-6), (16, 24.6e-6), (32, 25e-6)])
def test_engines_over_hosts_of_one_nvlink_domain_reduce_by_nccl(tensor: int, latency: float) -> None:
    # A host of GB200 NVL72 has four GPUs: vLLM's own kernel works within it. NCCL's ring with LL has 2 (n - 1) steps of
    # 0.6 us, NVLink's switches take 25 us for any number.
    gb200 = load_hardware("gb200")
    decoder = Decoder(DENSE, replace(gb200, efficiency=replace(gb200.efficiency, nvlink=1)), tensor, 2, 2)
    nbytes = 5 * DENSE.hidden * 2
    assert decoder._time_reduce(5) == pytest.approx(latency + 2 * nbytes * (tensor - 1) / tensor / 900e9)


class Counted(Decoder):
    """A decoder whose steps take a second for each sequence, and whose prefill takes none."""

    def time_step(self, sequences: float, context: float) -> float:
        return sequences

    def time_prefill(self, tokens: float, context: float) -> float:
        return 0.0


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_the_batch_is_that_of_a_simulation_token_by_token(limit: int) -> None:
    lengths = np.array([5.0, 1, 7, 3, 3, 9, 2])
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < limit:
            running.append(waiting.pop(0))
        seconds += len(running)
        running = [remaining - 1 for remaining in running if remaining > 1]
    generation = simulate_generation(Counted(DENSE, H100, 1, 2, 2), 4.0, lengths, Room(limit), copies=1)
    assert generation.seconds == pytest.approx(seconds) == lengths.sum()
    assert generation.busy <= limit


@pytest.mark.parametrize("room", [30, 44, 60, 90, 10_000])
@pytest.mark.parametrize("limit", [3, 100])
def test_sequences_that_outgrow_the_cache_make_room_and_are_computed_again(room: int, limit: int) -> None:
    prefills: list[float] = []

    class Watched(Counted):
        def time_prefill(self, tokens: float, context: float) -> float:
            prefills.append(tokens)
            return 0.01 * tokens

    prompt, lengths = 4, [int(length) for length in np.random.default_rng(2).integers(3, 20, 12)]
    # Token by token: first come, first served; the one that began last goes when the next token of all has no room.
    waiting, running = [(length, 0) for length in lengths], []
    seconds, recomputed, peak = 0.0, 0, 0
    while waiting or running:
        while waiting and len(running) < limit:
            used = sum(prompt + had for _, had in running)
            if running and used + prompt + waiting[0][1] + BLOCK_TOKENS * (len(running) + 1) > room:
                break
            running.append(waiting.pop(0))
            seconds += 0.01 * (prompt + running[-1][1])
        peak = max(peak, len(running))
        if len(running) > 1 and sum(prompt + had + 1 for _, had in running) > room:
            waiting.insert(0, running.pop())
            recomputed += 1
            continue
        seconds += len(running)
        running = [(length, had + 1) for length, had in running if had + 1 < length]
    simulated = simulate_generation(Watched(DENSE, H100, 1, 2, 2), prompt, lengths, Room(limit, room), copies=1)
    assert (simulated.preempted, simulated.peak) == (recomputed, peak)
    assert simulated.seconds == pytest.approx(seconds)
    assert len(prefills) == len(lengths) + recomputed


def test_the_mean_context_is_that_of_the_running_responses() -> None:
    samples: list[tuple[float, float]] = []

    class Watched(Counted):
        def time_step(self, sequences: float, context: float) -> float:
            samples.append((sequences, context))
            return 1.0

    simulate_generation(Watched(DENSE, H100, 1, 2, 2), 10.0, np.array([4.0, 2.0, 6.0]), Room(2), copies=1)
    # Two at once for 2 steps; then 4's last two and the first two of 6; then 6 alone.
    assert samples == [(2, 11.0), (2, pytest.approx(10 + (3 + 1) / 2)), (1, pytest.approx(10 + 4))]
