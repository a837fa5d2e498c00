"""Prompts: files, processing into token ids, loading in a resumable order, and splitting batches over ranks."""
