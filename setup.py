"""Which folders become which packages: conf/ and kernels/ live at the top of the repository but ship in the wheel."""

from setuptools import find_packages, setup

kernels = ["megatron_grpo_kernels", *(f"megatron_grpo_kernels.{name}" for name in find_packages("kernels"))]

setup(
    packages=[*find_packages(include=["megatron_grpo", "megatron_grpo.*"]), "megatron_grpo.conf", *kernels],
    package_dir={"megatron_grpo.conf": "conf", "megatron_grpo_kernels": "kernels"},
    package_data={
        "megatron_grpo.observability": ["grafana_dashboard.json"],
        "megatron_grpo.observability.page": ["assets/*"],
        "megatron_grpo.launch": ["slurm_pyxis.sbatch"],
        "megatron_grpo.platform": ["*.yaml"],
        "megatron_grpo.prepare": ["recipes.yaml", "starter/**/*.template"],
        "megatron_grpo.models": ["prepared_models.yaml"],
        "megatron_grpo.verification": ["*.yaml", "doctor/*.yaml"],
        "megatron_grpo.conf": ["**/*.yaml"],
        "megatron_grpo.config": ["*.yaml"],
        "megatron_grpo_kernels": ["**/*.cu", "**/*.cuh", "**/*.cpp"],
    },
)
