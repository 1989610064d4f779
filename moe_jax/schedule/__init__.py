"""WHEN tasks run: schedules as data; never imports jax."""
