"""Runs programs that a model wrote, where they can reach neither the network nor anybody's files or processes."""
