"""The platform of dry runs, whose tensors have no numbers: layers, kernels, and trackers of memory and work."""
