"""A training step whose tasks follow a schedule, so that communication overlaps computation."""
