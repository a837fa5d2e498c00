"""Folders laid out as released models are, with tiny vocabularies: tokenizer, template, config, no downloads."""
