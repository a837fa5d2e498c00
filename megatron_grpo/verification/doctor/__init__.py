"""Why generation and training of a recorded run differ: evidence, suspects, and the cause that explains it."""
