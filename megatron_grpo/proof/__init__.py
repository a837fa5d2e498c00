"""Proof that a layout changes speed and memory and nothing else: the same tokens through each, against transformers."""
