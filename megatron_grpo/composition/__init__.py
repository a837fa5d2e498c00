"""From a command line to a typed configuration: overrides, jobs, Hydra, suggestions and help; imports no torch."""
