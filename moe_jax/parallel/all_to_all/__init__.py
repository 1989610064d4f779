"""Ways to exchange blocks of rows between the ranks of a mesh axis: one file each, one signature."""

from moe_jax.parallel.all_to_all import flat, ring

EXCHANGES = {"flat": flat.exchange, "ring": ring.exchange}
