"""What a person sees of a run: one HTML page that needs nothing else. Imports no jax."""

from moe_jax.report.page import ReportError, write_report

__all__ = ["ReportError", "write_report"]
