"""Ways to sum a flat vector over the ranks of mesh axes: one file each, one signature.

Each leaves the same bits on every rank; from one way to another they differ by round-off.
"""

from moe_jax.parallel.reductions import all_reduce, ring, scatter_gather

REDUCTIONS = {"all_reduce": all_reduce.reduce, "scatter_gather": scatter_gather.reduce, "ring": ring.reduce}
