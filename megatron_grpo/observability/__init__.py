"""What a run reports: timers, metrics, plots, progress and the summary."""
