"""The schedule of a training step as data: tasks and the order in which they are issued. Never imports jax."""
