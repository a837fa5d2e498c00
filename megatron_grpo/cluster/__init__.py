"""The Ray cluster of a run, deadlines of remote calls, log and heartbeat files, and clean-up after a kill."""
