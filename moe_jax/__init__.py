"""Mixture-of-Experts training in JAX that overlaps communication with computation."""

__version__ = "0.1.0"
