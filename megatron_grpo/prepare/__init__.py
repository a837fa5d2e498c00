"""Models and data that recipes make for themselves, so that they run without a download."""
