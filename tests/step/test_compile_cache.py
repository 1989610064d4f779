"""Compiled programs are loaded by who starts again."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.stages import Lowered

from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.errors import ConfigError
from moe_jax.step import compile_cache
from moe_jax.step.compile_cache import BackgroundCompile, _all_have, cached_number, compiled

ROWS = PartitionSpec("x")


def test_a_program_is_compiled_once_and_loaded_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with collectives, whose state is donated and has names."""
    monkeypatch.setenv(PROGRAMS, str(tmp_path))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=({"weight": ROWS}, ROWS), out_specs={"weight": ROWS})
    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        return {"weight": state["weight"] + jax.lax.psum(batch, "x")}

    def on_mesh() -> jax.Array:
        return jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, ROWS))

    lowered = step.lower({"weight": on_mesh()}, on_mesh())
    first = compiled(lowered)({"weight": on_mesh()}, on_mesh())
    assert len(list(tmp_path.iterdir())) == 1
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=r"can be written to by others.*: use a folder of your own, with chmod 700$"):
        compiled(lowered)
    tmp_path.chmod(0o700)

    (kept_program,) = tmp_path.iterdir()
    whole = kept_program.read_bytes()
    kept_program.write_bytes(whole[: len(whole) // 2])
    compiled(lowered)
    assert len(kept_program.read_bytes()) == len(whole), "a damaged one is compiled again"

    def compile_again(*_: object) -> None:
        pytest.fail("compiled twice")

    monkeypatch.setattr(Lowered, "compile", compile_again)
    state = {"weight": on_mesh()}
    again = compiled(lowered)(state, on_mesh())
    assert state["weight"].is_deleted(), "donated"
    np.testing.assert_array_equal(first["weight"], np.arange(8) + 28)
    np.testing.assert_array_equal(again["weight"], first["weight"])


def test_a_program_that_came_from_jaxs_cache_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several fusions, whose functions XLA:CPU leaves out when it writes what it has loaded."""

    def lowered() -> Lowered:
        def product(x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = jnp.concatenate([jnp.sin(x @ x.T) @ x, jnp.cos(x)], axis=1)[:, :8].cumsum(axis=0)
            return x

        return jax.jit(product).lower(x)

    everywhere = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
    x = jax.device_put(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), everywhere)
    expected = lowered().compile()(x)  # into jax's cache
    monkeypatch.setenv(PROGRAMS, str(tmp_path))
    for _ in range(2):  # compiled, and loaded
        np.testing.assert_array_equal(compiled(lowered())(x), expected)
    assert len(list(tmp_path.iterdir())) == 1


class _Service:
    """What processes read and write, in threads of this one."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=60)
            return self._values[key]


class _Asked(dict[str, int]):
    """How often each of the processes, which share it here, has asked before."""

    def get(self, *_: object) -> int:
        return self["before"]


@pytest.mark.parametrize("kept", [(True, True, True), (True, False, True), (False, False, False)])
def test_processes_of_gpus_load_a_program_only_if_all_have_it(
    kept: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: a run may ask for the same program again."""
    own, service = threading.local(), _Service()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr("moe_jax.distributed.hosts.coordination", lambda: own.state)

    def asked(process: int) -> bool:
        own.state = SimpleNamespace(client=service, process_id=process, num_processes=3)
        return _all_have("step", kept[process])

    for before in range(2):
        monkeypatch.setattr(compile_cache, "_asked", _Asked(before=before))
        with ThreadPoolExecutor(max_workers=3) as pool:
            assert list(pool.map(asked, range(3))) == [all(kept)] * 3


def test_a_number_is_measured_once_where_there_is_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([1.5, 2.5, 3.5])
    assert cached_number("rate", lambda: next(numbers)) == 1.5
    monkeypatch.setenv(PROGRAMS, str(tmp_path))
    assert [cached_number("rate", lambda: next(numbers)) for _ in range(2)] == [2.5, 2.5]


def test_a_later_program_is_compiled_once_begun_or_asked_for() -> None:
    lowered: list[float] = []

    def lower(x: float = 1.0) -> Lowered:
        lowered.append(x)
        return jax.jit(lambda x: 2 * x).lower(x)

    with ThreadPoolExecutor(max_workers=1) as pool:
        begun, asked, _ = (BackgroundCompile(pool, lower) for _ in range(3))
        assert not lowered
        begun.begin()
        begun.begin()
        assert begun.result(timeout=60)(1.0) == asked.result(timeout=60)(1.0) == 2
        assert len(lowered) == 2, "once for each that is wanted"


def test_what_stops_a_later_program_is_reported_to_all_that_wait() -> None:
    def lower() -> Lowered:
        raise ConfigError("model.hidden_size=0")

    with ThreadPoolExecutor(max_workers=1) as pool, pytest.raises(ConfigError, match="hidden_size=0"):
        BackgroundCompile(pool, lower).result(timeout=60)
