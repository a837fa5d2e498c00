"""The Ray cluster, deadlines of remote calls, logs, heartbeats, clean-up after a kill."""
