"""Checks of a run before it starts that need a model's shape, the data's rows or this machine; imports no torch."""
