"""The life of a run around its algorithm: its folder, the start of its processes, checkpoints, its end."""
