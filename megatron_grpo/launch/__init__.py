"""Submits runs to Slurm, Kubernetes, a Ray cluster or this machine, and looks after them."""
