"""Shape-only layers and a tracker of memory: parts of the dry platform, on which tensors have no numbers."""
