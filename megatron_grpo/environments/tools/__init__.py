"""Tools that the model calls before it answers, and the environment in which it does."""
