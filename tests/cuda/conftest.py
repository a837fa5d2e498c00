"""Collects the tests of one mode, and none unless `python -m tests.cuda` has set it (see there)."""

import os

collect_ignore = [mode for mode in ("nvml", "null") if os.environ.get("CUDA_CHECK_MODE") != mode]
