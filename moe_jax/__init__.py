"""Mixture-of-Experts training in JAX that hides its communication."""

__version__ = "0.1.0"
