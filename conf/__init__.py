"""The YAML files of the Hydra configuration, found as pkg://megatron_grpo.conf wherever the package is installed."""
