"""jax's coordination service, through which processes exchange small values without a collective."""

from typing import Any

from jax._src import distributed  # the service has no public interface


def coordination() -> Any:
    """Return this process's part in the service: its `client`, `process_id` and `num_processes`.

    Without the service the client is None. Does not start jax's devices.
    """
    return distributed.global_state
