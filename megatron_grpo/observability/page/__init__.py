"""Report of one or two runs as one self-contained HTML page: curves, configuration and trajectories."""
