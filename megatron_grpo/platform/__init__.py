"""Differences between CUDA and CPU, decided in one place, and the registry of hooks into libraries."""
