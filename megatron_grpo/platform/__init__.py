"""Differences between CUDA and CPU, and hooks into libraries."""
