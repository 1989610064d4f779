"""HOW FAST: measurements of this machine and of compiled programs."""
