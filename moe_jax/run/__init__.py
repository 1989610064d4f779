"""A training run on the host: setup, the loop, and all that happens between steps."""
