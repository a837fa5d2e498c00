"""Runs programs of a model without access to the network and to the files and processes of others."""
