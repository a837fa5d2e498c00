"""The keys of on-policy distillation: its teachers."""

from __future__ import annotations

from dataclasses import field

from megatron_grpo.config.policy_schema import FamilySection, ParallelConfig
from megatron_grpo.config.section import Address, PathText, Positive, SecretVariable, Section


class TeacherModelConfig(FamilySection):
    """The weights of a teacher."""

    path: PathText | None = None
    """Folder or hub name of a model of any family, with the policy's tokenizer; required unless server_url is given."""


class TeacherConfig(Section):
    """A frozen model that scores the tokens which the policy sampled; for algorithm=distillation."""

    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    microbatch_tokens: Positive | None = None
    """Most tokens, padding included, in a forward pass of one data-parallel rank; null: as in the policy's passes for
    log-probabilities."""

    server_url: Address | None = None
    """Address of an OpenAI-compatible vLLM server that has the teacher, http://HOST:PORT: its prompt_logprobs replace
    ranks of the run. Needs distillation.topk_logits_k. null: the run's own ranks have it."""

    api_key_variable: SecretVariable | None = None
    """Environment variable with the API key of server_url; null: it needs none. The run's own token is never sent."""


class DistillationConfig(Section):
    """How the policy is compared with its teacher; GRPO has the loop."""

    topk_logits_k: Positive | None = None
    """Tokens of the teacher at each position, its likeliest; all others are one further entry, the tail. null: the
    teacher's whole distribution, from its hidden states."""

    hint_prompt: str | None = None
    """With algorithm=self_distillation, the text of the teacher's prompt, as in data.prompt_file, which it replaces: {}
    stands for the row's prompt, {NAME} for a column, such as a demonstration or feedback that only the teacher sees."""
