"""Hosts that meet: who is let in, and what host 0 knows of those that are. Both sides are here, in threads."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from moe_jax.launch.channel import _MAX_LINE, Channel, LostError, RefusedError, join
from moe_jax.launch.events import FORWARDED, JOINED, Events
from moe_jax.launch.rendezvous import LaunchError, Rendezvous, card
from moe_jax.launch.start import Launch, WorkerShare

TOKEN = b"a secret of the run"


def launch_of(port: int, **changes: object) -> Launch:
    launch = Launch(
        module="moe_jax.train",
        command=["--config", "tiny.yaml"],
        processes=2,
        min_processes=4,
        port=None,
        grace_s=1,
        retries=0,
        progress_timeout_s=1,
        start_timeout_s=1,
        hosts=2,
        host=0,
        min_hosts=2,
        rendezvous=("127.0.0.1", port),
        host_timeout_s=5,
        token=TOKEN,
    )
    return replace(launch, **changes)


@pytest.fixture
def events() -> Events:
    return queue.SimpleQueue()


@contextmanager
def opened(events: Events) -> Iterator[tuple[Launch, Rendezvous]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        launch = launch_of(free.getsockname()[1])
    with Rendezvous(launch, events) as others:
        yield launch, others


@contextmanager
def called(launch: Launch, **changes: object) -> Iterator[Channel]:
    """As host 1 does."""
    other = replace(launch, **{"host": 1, **changes})
    channel = Channel(socket.create_connection(launch.rendezvous), silence_s=5)
    try:
        join(channel, other.token, card(other))
        yield channel
    finally:
        channel.close()


def message(channel: Channel, kind: str) -> dict:
    """The next one that is no sign of life."""
    while True:
        found = channel.receive()
        if found["kind"] != "beat":
            assert found["kind"] == kind
            return {name: value for name, value in found.items() if name != "kind"}


def wait_until(happened) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_of_another_host_is_started_heard_of_ended_and_finished(events: Events) -> None:
    with opened(events) as (launch, others):
        assert others.missing() == {1}
        with called(launch) as channel:
            assert events.get(timeout=60) == (JOINED, 1)
            assert (others.missing(), others.address(1)) == (set(), "127.0.0.1")
            part = WorkerShare(rank=2, place=2, processes=4, coordinator="127.0.0.1:4242", again=True)
            worker = others.start(1, part)
            assert message(channel, "start") == part._asdict()
            channel.send("beat", running=[[2, 7, True, "no step after 7 for 1 s", True]])
            wait_until(lambda: worker.is_stopped)
            assert (worker.reached, worker.has_begun_a_step) == (7, True)
            assert worker.overdue(1, 1) == "no step after 7 for 1 s"
            worker.send(9)
            assert message(channel, "signal") == {"rank": 2, "number": 9}
            channel.send("signal", number=15)
            assert events.get(timeout=60) == (FORWARDED, 15)
            channel.send("ended", rank=2, code=-9, reached=8, has_begun=True, has_no_mesh=True)
            assert events.get(timeout=60) == (2, -9)
            worker.code = -9
            assert (worker.reached, worker.has_no_mesh, worker.how_it_ended()) == (8, True, "killed by SIGKILL")
            worker.finish(print_errors=True)
            assert message(channel, "finish") == {"rank": 2, "print_errors": True}
            ending = threading.Thread(target=others.end, args=[3])
            ending.start()
            assert message(channel, "end") == {"code": 3}
        ending.join(timeout=60)
        assert not ending.is_alive()


@pytest.mark.parametrize("output", ["nothing more", "a rank that does not run", "no JSON", "too much"])
def test_a_host_that_goes_or_sends_what_it_should_not_is_lost_with_its_workers(output: str, events: Events) -> None:
    with opened(events) as (launch, others), called(launch) as channel:
        assert events.get(timeout=60) == (JOINED, 1)
        workers = [others.start(1, WorkerShare(rank, rank, 4, "127.0.0.1:4242", False)) for rank in (2, 3)]
        if output == "a rank that does not run":
            channel.send("ended", rank=1, code=0, reached=0, has_begun=False)
        elif output == "nothing more":
            channel.close()
        else:
            channel._connection.sendall(b"[]\n" if output == "no JSON" else b"x" * (_MAX_LINE + 1))
        assert [events.get(timeout=60) for _ in workers] == [(2, 75), (3, 75)]
        assert {worker.how_it_ended() for worker in workers} == {"lost with its host"}
        assert others.missing() == {1}
        others.start(1, WorkerShare(2, 2, 4, "127.0.0.1:4242", False))
        assert events.get(timeout=60) == (2, 75), "lost from the start"
        with called(launch):
            assert events.get(timeout=60) == (JOINED, 1), "it may return"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token": b"a secret of another"}, "it has another token"),
        ({"command": ["--config", "other.yaml"]}, "it was started with another command"),
        ({"processes": 3}, "it was started with another command"),
        ({"host": 2}, "there is no host 2 of 2"),
        ({"host": 0}, "there is no host 0 of 2"),
    ],
)
def test_others_are_refused_with_the_reason(changes: dict, why: str, events: Events) -> None:
    with opened(events) as (launch, others):
        with pytest.raises(RefusedError, match=f"^{why}$"), called(launch, **changes):
            pass
        assert others.missing() == {1}


def test_a_host_that_is_there_is_not_replaced_and_the_other_may_try_again(events: Events) -> None:
    with opened(events) as (launch, others), called(launch):
        assert events.get(timeout=60) == (JOINED, 1)
        with pytest.raises(LostError, match="host 1 is there already"), called(launch):
            pass
        assert others.missing() == set()


@pytest.mark.parametrize(
    "output", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "join"}\n', b"\xff\n", b"[" * 5000 + b"\n"]
)
def test_strangers_change_nothing(output: bytes, events: Events) -> None:
    with opened(events) as (launch, _):
        with socket.create_connection(launch.rendezvous, timeout=60) as stranger:
            stranger.sendall(output)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):  # until it is hung up on
                pass
        with called(launch):
            assert events.get(timeout=60) == (JOINED, 1)


def test_a_host_0_that_does_not_know_the_token_is_not_followed() -> None:
    """It admits every caller, and sends the proof back that it got."""

    def pretend(server: socket.socket) -> None:
        channel = Channel(server.accept()[0])
        channel.send("hello", nonce="0")
        channel.send("welcome", proof=channel.receive()["proof"])
        channel.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=[server])
        thread.start()
        with (
            pytest.raises(RefusedError, match=r"^it does not know this token$"),
            called(launch_of(server.getsockname()[1])),
        ):
            pass
        thread.join()


def test_a_name_that_only_host_0_reaches_is_refused(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 8475))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(LaunchError) as refusal, Rendezvous(launch_of(8475, rendezvous=("node0", 8475)), events):
        pass
    assert str(refusal.value) == (
        "--rendezvous=node0:8475 is 127.0.1.1 on host 0, where no other host can reach it: "
        "give host 0's IP address (hostname -I prints it), or mend /etc/hosts"
    )


def test_an_address_of_another_host_is_one_line(events: Events) -> None:
    launch = launch_of(4242, rendezvous=("192.0.2.1", 4242))
    with pytest.raises(LaunchError) as refusal, Rendezvous(launch, events):
        pass
    assert str(refusal.value) == (
        "--rendezvous=192.0.2.1:4242 cannot be opened by host 0 (Cannot assign requested address): "
        "name an address of its own and a free port"
    )


def test_one_host_listens_nowhere(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", None)
    with Rendezvous(launch_of(0, hosts=1), events) as others:
        assert others.missing() == set()
        others.end(0)
