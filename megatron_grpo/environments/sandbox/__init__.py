"""Runs programs that a model wrote, isolated from network, files and processes."""
