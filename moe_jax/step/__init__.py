"""The compiled training step: plain, scheduled, or pipelined."""
