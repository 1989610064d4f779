"""What a run measures of itself and writes: metrics, rates, energy, alarms."""
