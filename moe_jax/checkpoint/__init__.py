"""Checkpoints on disk: saving them, finding the newest intact one, and checking that a run can resume from it."""
