"""Plans of runs without GPUs: memory, time and layouts, from dry runs of ranks and a profile of the hardware."""
