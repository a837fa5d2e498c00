"""Refit through a folder that both sides see: every version is written once, and read by engines wherever they run."""
