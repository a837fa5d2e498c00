"""Prompts: sources of rows, rendering, tokenization, and loaders that a resumed run continues."""
