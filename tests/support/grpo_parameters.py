"""A flat job with every field."""

from typing import Any

from tests.support.hf_configs import read_configs

GRPO_PARAMETERS: dict[str, Any] = read_configs("grpo_parameters")
"""The optional fields of NeMo Customizer's GrpoParametersParam."""

WITHOUT_CORRECTION = {
    field: value for field, value in GRPO_PARAMETERS.items() if field != "use_importance_sampling_correction"
}
WITHOUT_FILTERS = {
    field: value for field, value in GRPO_PARAMETERS.items() if field not in ("generation_top_k", "generation_top_p")
}
"""The same in two jobs: the correction would take the filters for a difference between the frameworks."""
