"""A training run on the host: setup, the loop, and everything that happens between steps."""
