"""The typed configuration of a run: schema, composition and every check that needs no process; imports no torch."""
