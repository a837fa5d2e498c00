"""The life of a run: set-up, its folder, checkpoints, the loop around an algorithm's steps, validation, its end."""
