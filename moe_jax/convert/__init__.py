"""Checkpoints of Hugging Face, read and written: one file for each family of models."""
