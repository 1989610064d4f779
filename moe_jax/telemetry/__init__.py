"""Metrics, rates, energy and alarms that a run measures and writes."""
