"""A flat job with every field."""

from typing import Any

GRPO_PARAMETERS: dict[str, Any] = {
    "generation_batch_size": 17,
    "generation_pipeline_parallel_size": 1,
    "generation_temperature": 0.7,
    "generation_top_k": 50,
    "generation_top_p": 0.9,
    "logprob_chunk_size": 33,
    "max_grad_norm": 0.5,
    "normalize_rewards": False,
    "num_generations_per_prompt": 4,
    "num_prompts_per_step": 12,
    "overlong_filtering": True,
    "ratio_clip_c": 3.0,
    "ratio_clip_max": 0.28,
    "ratio_clip_min": 0.1,
    "ref_policy_kl_penalty": 0.05,
    "token_level_loss": False,
    "use_importance_sampling_correction": True,
    "use_on_policy_kl_approximation": True,
    "use_rloo": False,
}
"""The optional fields of NeMo Customizer's GrpoParametersParam, each with a value that the quickstart does not have."""

WITHOUT_CORRECTION = {
    field: value for field, value in GRPO_PARAMETERS.items() if field != "use_importance_sampling_correction"
}
WITHOUT_FILTERS = {
    field: value for field, value in GRPO_PARAMETERS.items() if field not in ("generation_top_k", "generation_top_p")
}
"""The same in two jobs: the correction would take the filters for a difference between the frameworks."""
