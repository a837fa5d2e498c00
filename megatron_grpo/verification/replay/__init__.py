"""A recorded training step, done again and compared with its record."""
