"""Faults in the processes of a real run, and what becomes of the run."""
