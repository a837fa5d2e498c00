"""Ray: the machines of a run, its worker groups and how their failures are reported."""
