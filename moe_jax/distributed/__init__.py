"""The processes of one run: joining them, exiting when one fails, progress reports, and signals."""
