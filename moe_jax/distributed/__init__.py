"""The processes of one run: how they join, how they notice that one failed, and signals."""
