"""The model: parameters declared with Flax nnx, and the mathematics as plain functions."""
