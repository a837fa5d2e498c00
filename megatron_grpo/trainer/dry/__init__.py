"""The dry platform: a rank of any job on tensors without numbers, with the memory that it would take on a GPU."""
