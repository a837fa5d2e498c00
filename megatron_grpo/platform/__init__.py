"""Differences between CUDA and CPU, profiles of GPUs, and hooks into libraries."""
