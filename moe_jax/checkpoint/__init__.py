"""Checkpoints on disk: saving, finding the latest intact one, and what must fit for a run to resume from it."""
