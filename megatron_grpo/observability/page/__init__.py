"""A run, or two, as one HTML page that needs nothing else: curves, configuration and trajectories."""
