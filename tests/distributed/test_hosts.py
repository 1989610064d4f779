"""Which processes share a host, with a stand-in for jax's coordination service."""

import socket
from collections.abc import Iterator

import jax
import pytest

from moe_jax.distributed import hosts as module
from moe_jax.distributed.hosts import coordination, hosts, nodes, publish_host


class Service:
    """A store of keys that all processes share; a process that asks for a missing key fails at once."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite, "a process may publish its host twice"
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        assert timeout_ms > 0
        return self.values[key]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    found = Service()
    monkeypatch.setattr(coordination(), "client", found)
    module._hosts.cache_clear()
    yield found
    module._hosts.cache_clear()


@pytest.mark.parametrize(
    ("names", "same_host", "same_node"),
    [
        (["a", "a"], [[0, 1]], [[0], [1]]),  # all on one host: each process fails alone
        (["a", "b", "a", "b"], [[0, 2], [1, 3]], [[0, 2], [1, 3]]),
        (["a", "b", "c"], [[0], [1], [2]], [[0], [1], [2]]),
    ],
)
def test_processes_share_a_host_if_its_name_is_the_same(
    names: list[str],
    same_host: list[list[int]],
    same_node: list[list[int]],
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act_as(rank: int) -> None:
        monkeypatch.setattr(coordination(), "process_id", rank)
        monkeypatch.setattr(socket, "gethostname", lambda: names[rank])

    monkeypatch.setattr(jax, "process_count", lambda: len(names))
    for rank in range(1, len(names)):
        act_as(rank)
        publish_host()
    act_as(0)
    assert grouped(hosts()) == same_host, "process 0 publishes its own name when it asks"
    assert grouped(nodes()) == same_node


def grouped(numbers: list[int]) -> list[list[int]]:
    return [[rank for rank, each in enumerate(numbers) if each == number] for number in dict.fromkeys(numbers)]


def test_a_host_is_published_before_devices_start(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are compared before: with other settings, processes may not be able to start them together."""
    monkeypatch.setattr(jax, "process_index", lambda: pytest.fail("it starts jax's devices"))
    publish_host()
    assert service.values.keys() == {"moe_jax_host/0"}


def test_without_a_coordination_service_each_process_has_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert hosts() == nodes() == [0, 1, 2]


def test_a_single_process_needs_no_service(service: Service) -> None:
    assert hosts() == nodes() == [0]
    assert not service.values
