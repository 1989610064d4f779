"""The launcher: it starts, watches and restarts the processes of a run, on one or several hosts."""
