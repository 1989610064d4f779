"""Reports of runs: a self-contained HTML page, and figures for notebooks. Importing it does not import jax."""

from moe_jax.report.load_plots import load_figure
from moe_jax.report.numbers import ReportError
from moe_jax.report.page import write_report

__all__ = ["ReportError", "load_figure", "write_report"]
