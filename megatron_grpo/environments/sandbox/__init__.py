"""Runs programs that a model wrote, without access to the network or to other files and processes."""
