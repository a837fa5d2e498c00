"""The typed configuration of a run: schema and composition, without torch."""
