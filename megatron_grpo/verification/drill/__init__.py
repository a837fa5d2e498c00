"""A drill: faults in the processes of a real run, and their outcomes."""
