"""WHICH mapping and schedule: pure functions of numbers; never imports jax."""
