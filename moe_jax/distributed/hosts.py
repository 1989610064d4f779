"""What processes exchange without a collective, through jax's coordination service: small values, from any thread.

So they publish the names of their hosts, by which others know which of them share a host.
"""

import functools
import socket
import zlib
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the service has no public interface


def coordination() -> Any:
    """Return this process's part in the service: its `client`, `process_id` and `num_processes`.

    Without the service the client is None. Does not start jax's devices.
    """
    return distributed.global_state


def conclusion(name: str, own: str, conclude: Callable[[list[str]], str], timeout_s: float) -> str:
    """Return what process 0 concludes from the texts of all processes, in the order of their numbers.

    All of them call it, with the same `name`, each name once. Raises jax's error after the timeout.
    """
    state, timeout_ms = coordination(), round(timeout_s * 1000)
    state.client.key_value_set(f"{name}/{state.process_id}", own)
    if state.process_id == 0:
        texts = [
            state.client.blocking_key_value_get(f"{name}/{each}", timeout_ms) for each in range(state.num_processes)
        ]
        state.client.key_value_set(f"{name}/all", conclude(texts))
    return str(state.client.blocking_key_value_get(f"{name}/all", timeout_ms))


_KEY = "moe_jax_host"
_TIMEOUT_MS = 120_000  # for the name of another process's host, which it publishes when it joins


def publish_host() -> None:
    """Publish the name of this host to the other processes. Call it once the processes have joined.

    Does not start jax's devices: processes compare their settings first.
    """
    name, state = zlib.crc32(socket.gethostname().encode()), coordination()
    state.client.key_value_set(f"{_KEY}/{state.process_id}", str(name), allow_overwrite=True)


def hosts() -> list[int]:
    """Return the number of each process's host, which is the same for processes of one host.

    Without the coordination service, which a single process and TPUs may lack, each process counts as a host. Raises
    jax's error if a process does not publish its host's name within two minutes.
    """
    count = jax.process_count()
    return list(range(count) if coordination().client is None or count == 1 else _hosts(count))


def nodes() -> list[int]:
    """Number the nodes of processes, which fail together: a node is a host or, if all are on one host, a process."""
    found = hosts()
    return found if len(set(found)) > 1 else list(range(len(found)))


@functools.cache
def _hosts(num_processes: int) -> tuple[int, ...]:
    publish_host()  # for users' own programs, which join their processes themselves
    client = coordination().client
    return tuple(int(client.blocking_key_value_get(f"{_KEY}/{each}", _TIMEOUT_MS)) for each in range(num_processes))
