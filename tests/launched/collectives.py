"""Sums and an all-to-all over the devices of all processes, checked on each of them."""

import argparse

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax.distributed.processes import add_arguments, initialize, is_main_process, options_from

parser = argparse.ArgumentParser()
parser.add_argument("--cpu-devices", type=int)
add_arguments(parser)
arguments = parser.parse_args()
initialize(options_from(arguments), arguments.cpu_devices)

n = jax.device_count()
mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,))
rows, everywhere = PartitionSpec("x", None), PartitionSpec(None, None)


def exchange(sent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.psum(sent, "x"), jax.lax.all_to_all(sent, "x", 1, 1)


payload = 100 * np.arange(n)[:, None] + np.arange(n)[None, :]  # device i sends 100 i + j to device j
sent = jax.make_array_from_callback((n, n), NamedSharding(mesh, rows), lambda index: payload[index])
sums, received = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=rows, out_specs=(everywhere, rows)))(sent)
for shard in received.addressable_shards:
    np.testing.assert_array_equal(shard.data, payload.T[shard.index])
np.testing.assert_array_equal(sums.addressable_data(0), payload.sum(0, keepdims=True))
if is_main_process():
    print(f"{jax.process_count()} processes with {jax.local_device_count()} devices each")
