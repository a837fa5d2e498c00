"""Every payload that passes between processes: trajectories, batches, requests, and the files that record them."""
