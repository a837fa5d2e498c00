"""Patches and settings that let libraries that assume CUDA run on a CPU."""
