"""Planning: which mesh, schedule and settings to train with. Pure functions of numbers; never imports jax."""
