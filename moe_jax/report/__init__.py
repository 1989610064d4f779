"""What a person sees of a run: one HTML page that needs nothing else, and figures for notebooks. Imports no jax."""

from moe_jax.report.load_plots import load_figure
from moe_jax.report.numbers import ReportError
from moe_jax.report.page import write_report

__all__ = ["ReportError", "load_figure", "write_report"]
