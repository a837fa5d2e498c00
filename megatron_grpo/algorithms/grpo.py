"""Group Relative Policy Optimization (Shao et al. 2024): sample groups of responses, score, learn, publish, repeat.

The driver runs the code of this folder. It holds numbers about sequences and references to their tokens; tokens pass
between the other processes, through the object store. A partition is some sequences of a step, stored together.

                     driver: algorithms/ (a run and its steps), run/ (its start, checkpoints and end)
            lengths, rewards │            ▲ references            │ sequences of each microbatch
     prompts, seeds          │            │                       ▼
   ┌──────────────────▶ rollout workers (rollouts/) ─────▶ ranks of policy and value model (trainer/)
   │                     a coroutine a rollout     │           fetch the fields that their stage uses
   │        requests │ ▲ responses   texts │ ▲ scores  arrays          │            ▲
   │                 ▼ │                   ▼ │          ▼              ▼            │
   │          vLLM engines            environments   object store: for each partition, an array a field
   │          (generation/)         (environments/)  token_ids, sampled, generation_logprobs │ prev_logprobs, ...
   │                 ▲
   └─────────────────┴── refit (weight_sync/): weights of version N, verified, from every pipeline stage

The life of a step:

1. The loader gives num_prompts_per_step prompts as token ids.
2. Sample (samples.py). A rollout is a coroutine in a rollout worker. It awaits its responses from the least loaded
   engine, and when all samples of a prompt are complete, their environment scores them while others are still
   generated. A response has its token ids, the log-probability under which each token was drawn, the reason it stopped,
   and its weight versions. The driver gets lengths, rewards and references. With use_dynamic_sampling groups whose
   rewards are all equal are dropped, and sampling repeats until the step is full.
3. Make scores of the rewards (step_advantages.py): scale and shape them, once, and find groups with a learning signal.
4. Batch (batch/step_batch.py). Sequences are assigned to partitions, whose tokens are put into the object store once.
   Later stages add fields by reference.
5. Log-probabilities, only as far as the step needs them: of the reference policy for a KL term; of the policy itself
   when several optimizer steps follow, or an option compares it with the engines.
6. Advantages (step_advantages.py): within each group, reward minus baseline. Where advantages differ by token
   (REINFORCE++, GAE, a KL in the reward) a rollout worker computes them (token_functions.py).
7. Learn (stages.py): num_iterations passes, an optimizer step for every train_global_batch_samples samples. The driver
   assigns sequences to microbatches by their lengths.
8. Publish (placement.py): the refit sends the new weights to every engine, which verifies and commits them as the next
   version, and serves them once the canary agrees.
9. Report (step_report.py); then the loop (loop.py) logs, validates and saves.

With async_grpo.enabled only step 2 differs: it takes samples from a buffer of prompts that were begun earlier
(sample_buffer.py). With PPO (ppo.py) a value model gives its values after step 5, and learns after the policy has.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms.context import GRPORun, GRPOSaveState, SamplingRun
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.samples import dynamic_sampling, sample
from megatron_grpo.algorithms.setup import setup
from megatron_grpo.algorithms.stages import add_logprobs, prepare_batch, publish_and_report, train_policy
from megatron_grpo.algorithms.step_advantages import add_advantages
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics, compute_sampling_metrics
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.advantages import scale_rewards
from megatron_grpo.observability.timing import StepTimer, compute_rates
from megatron_grpo.weight_sync.transfer_modes import TransferReport
from megatron_grpo.weight_sync.transport import WeightTransport

# With names of NeMo RL that scripts import from here (docs/python.md).
__all__ = [
    "GRPORun",
    "GRPOSaveState",
    "async_grpo_train",
    "dynamic_sampling",
    "grpo_step",
    "grpo_train",
    "refit_policy_generation",
    "scale_rewards",
    "setup",
    "validate",
]


def grpo_train(run: GRPORun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, grpo_step)


def async_grpo_train(run: GRPORun) -> None:
    """Train with grpo.async_grpo.enabled: NeMo RL's name for `grpo_train`."""
    if run.buffer is None:
        raise ValueError("this run samples synchronously; set it up with grpo.async_grpo.enabled=true")
    grpo_train(run)


def refit_policy_generation(transport: WeightTransport, version: int) -> TransferReport:
    """Send the policy's weights as `version`; `WeightTransport.admit` has to follow."""
    return transport.publish(version)


def grpo_step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step: sample, score, learn, publish; None: no prompts left.

    Raises SamplingError if sampling or scoring failed, or training and generation disagree too much (the weights are as
    before the step), and RunError if a value is not finite, or a process failed.
    """
    config, policy, rollouts, timer = run.config, run.policy, run.rollouts, StepTimer()
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    batch, check = prepare_batch(run, samples, timer)
    logprob_metrics = add_logprobs(config, batch, policy, rollouts, check, timer)
    with timer.phase("advantages"):
        is_finite = add_advantages(config, samples.scores, batch, rollouts, run.state)
    check.require_finite("advantages", is_finite | ~batch.in_loss, batch)
    run.dumps.begin()  # rollouts are written while the policy learns
    with timer.phase("train"):
        learned = train_policy(config, batch, policy, run.loss_fn, check)
    metrics = compute_sampling_metrics(config, samples)
    metrics |= logprob_metrics | compute_learning_metrics(learned, batch)
    return publish_and_report(run, samples, metrics, learned, timer)


def sample_steps(run: SamplingRun) -> None:
    """Sample and score until a limit is reached (debug.train=false)."""
    train_steps(run, sampling_step)


def sampling_step(run: SamplingRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do the first half of any algorithm's step; None: no prompts are left."""
    config, timer = run.config, StepTimer()
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    run.dumps.hold(run.state["total_steps"] + 1, samples.groups, None, samples.make_facts(run.loader_state))
    run.dumps.begin()
    outcomes = samples.outcomes
    metrics = compute_sampling_metrics(config, samples)
    # The metric valid_tokens counts the tokens that would be in the loss.
    metrics |= compute_learning_metrics(None, StepBatch.from_outcomes(config, outcomes))
    timing = timer.seconds
    speed = compute_rates([tokens for outcome in outcomes for tokens, _ in outcome.sequences], timing)
    return StepReport(metrics, timing, {**speed, **samples.engines}, samples.sampled)
