"""Collectives in the background: many at a time in any order, and what becomes of them when a process ends."""

import contextlib
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import MeshConfig
from moe_jax.errors import ConfigError, MeshError
from moe_jax.models.exchange_choice import exchange_of
from moe_jax.parallel import background
from moe_jax.parallel import p2p_transport as post
from moe_jax.parallel.mesh import BATCH_AXES, Axis, make_mesh
from moe_jax.parallel.p2p_transport import MessageTag, P2PTransport
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.schedule.link_order import Priority
from tests.parallel.per_device import on_mesh
from tests.small import small_config


def test_collectives_under_way_together_do_not_mix():
    """Same kind, shape and group; finished in another order than started; then once more in a loop."""

    def body(x):
        def both(x, _):
            handles = [background.start(x * factor, "exchange", (Axis.EXPERT,)) for factor in (1, 10, 100)]
            handles.append(background.start(x, "sum", BATCH_AXES))
            results = [background.finish(handle, jax.ShapeDtypeStruct(x.shape, x.dtype)) for handle in handles[::-1]]
            return x + 1, jnp.stack(results)

        return jax.lax.scan(both, x[0], jnp.arange(3))[1][None]

    x = np.arange(32, dtype=np.int32).reshape(8, 4)
    found = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4)(x)
    for turn in range(3):
        now = x + turn
        exchanged = now.reshape(2, 4, 4).swapaxes(1, 2).reshape(8, 4)
        total = np.broadcast_to(now.sum(axis=0), (8, 4))
        np.testing.assert_array_equal(found[:, turn, 0], total)
        for place, factor in ((1, 100), (2, 10), (3, 1)):
            np.testing.assert_array_equal(found[:, turn, place], factor * exchanged)


def test_stages_send_around_the_ring_both_ways():
    def body(x):
        handles = [background.start(x, kind, (Axis.EXPERT,)) for kind in ("to_next", "to_previous")]
        return jnp.stack([background.finish(each, jax.ShapeDtypeStruct(x.shape, x.dtype)) for each in handles], axis=1)

    x = np.arange(8, dtype=np.int32)
    found = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4)(x)
    np.testing.assert_array_equal(found[:, 0], [3, 0, 1, 2, 7, 4, 5, 6])
    np.testing.assert_array_equal(found[:, 1], [1, 2, 3, 0, 5, 6, 7, 4])


def test_collectives_in_a_row_are_handed_on_without_the_program():
    """An exchange, the gather of what it brought, its sum, and the exchange back; then the same once more."""

    def body(x):
        def sent_on(x_Pn, _):
            handle = background.start(x_Pn, "exchange", (Axis.EXPERT,))
            handle = background.start_after(handle, "gather_rows", (Axis.DATA,))
            gathered = background.finish(handle, jax.ShapeDtypeStruct((2 * len(x_Pn), x_Pn.shape[1]), x_Pn.dtype))
            handle = background.start(gathered.reshape(2, *x_Pn.shape), "scatter_rows", (Axis.DATA,))
            handle = background.start_after(handle, "exchange", (Axis.EXPERT,))
            summed = background.finish(handle, jax.ShapeDtypeStruct(x_Pn.shape, x_Pn.dtype))
            return x_Pn + 1, jnp.concatenate([gathered, summed])

        return jax.lax.scan(sent_on, x[0].reshape(4, 2), jnp.arange(2))[1][None]

    x = np.arange(64, dtype=np.int32).reshape(8, 8)
    found = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4)(x)
    for turn in range(2):
        now = (x + turn).reshape(2, 4, 4, 2)  # data, source, target, number
        gathered = now.swapaxes(1, 2).swapaxes(0, 1).reshape(4, 8, 2)
        np.testing.assert_array_equal(found[:, turn, :8], np.concatenate([gathered, gathered]))
        np.testing.assert_array_equal(found[:, turn, 8:], 2 * now.reshape(8, 4, 2))


def test_only_what_a_stage_waits_for_travels():
    """Device 1 of each ring of four sends to device 2, and no other does; others get zeros, and no handle."""

    def body(x):
        place = jax.lax.axis_index(Axis.EXPERT)
        handle = background.start(x + 1, "to_next", (Axis.EXPERT,), jnp.stack([place == 1, place == 2]))
        return background.finish(handle, jax.ShapeDtypeStruct(x.shape, x.dtype))

    found = on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4)(np.arange(8, dtype=np.int32))
    np.testing.assert_array_equal(found, [0, 0, 2, 0, 0, 0, 6, 0])


def test_what_comes_before_it_is_expected_is_kept():
    box = P2PTransport((0,))
    box.send(MessageTag(0, 0, 7, 1), np.arange(5))
    box.send(MessageTag(0, 0, 7, 0), np.arange(5) + 10)
    for number, first in ((0, 10), (1, 0)):
        out = np.empty(5, int)
        box.expect(MessageTag(0, 0, 7, number), out)
        box.receive(MessageTag(0, 0, 7, number))
        np.testing.assert_array_equal(out, first + np.arange(5))


def test_connecting_another_mesh_ends_the_threads_of_the_one_before():
    two, four = (make_mesh(MeshConfig(data=1, expert=count), jax.devices()[:count]) for count in (2, 4))
    background.connect(four)
    before = set(threading.enumerate())
    background.connect(two)
    engine, nothing = background.engine(), np.zeros(2)
    handles = [engine.start("sum", each, (0, 1), 0, nothing, background.CollectiveShare()) for each in (0, 1)]
    for handle in handles:
        engine.finish(handle)
    new = set(threading.enumerate()) - before
    assert len(new) == 4  # a sender and an adder for each device; others have no job
    background.connect(four)
    assert not any(thread.is_alive() for thread in new)


def test_closing_sends_the_rest_notifies_who_waits_and_ends_the_reader(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(post, "_connections", lambda: {1: ours})
    before, reported = set(threading.enumerate()), []
    box = P2PTransport((0, 1))
    readers = set(threading.enumerate()) - before

    def wait():
        try:
            box.receive(MessageTag(1, 0, 0, 0))
        except ConnectionError as error:
            reported.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    box.send(MessageTag(0, 1, 0, 0), np.arange(4, dtype=np.uint8))
    box.close()
    waiting.join(timeout=30)
    assert reported
    assert readers
    assert not any(reader.is_alive() for reader in readers)
    with theirs:
        assert theirs.recv(1024).endswith(bytes(range(4)))
        assert theirs.recv(1024) == b""


def test_urgent_jobs_overtake_others_and_none_of_their_kind():
    worker, ready, done, order = background.JobThread(), threading.Event(), threading.Event(), []
    worker.submit(ready.wait)
    for job, urgency in (
        ("sum 0", Priority.DATA),
        ("exchange 0", Priority.EXPERT),
        ("stage", Priority.PIPELINE),
        ("sum 1", Priority.DATA),
        ("exchange 1", Priority.EXPERT),
    ):
        worker.submit(lambda job=job: order.append(job), urgency)
    worker.submit(done.set)
    ready.set()
    worker.close()
    assert done.is_set()
    assert order == ["exchange 0", "exchange 1", "stage", "sum 0", "sum 1"]


def test_counts_of_tokens_are_sent_before_gradients(monkeypatch):
    """The backward pass waits for them, even while gradients and exchanges are always ready."""
    background.connect(make_mesh(MeshConfig(data=1, expert=2), jax.devices()[:2]))
    engine, ready, sent = background.engine(), threading.Event(), []
    send = engine._transport.send
    monkeypatch.setattr(engine._transport, "send", lambda key, x: sent.append((key.source, x.dtype)) or send(key, x))
    engine._senders[0, False].submit(ready.wait, Priority.EXPERT)
    gradient, count = np.ones(4, np.float32), np.ones(4, np.int32)
    handles = [
        engine.start("sum", device, (0, 1), channel, x, background.CollectiveShare())
        for channel, x in enumerate((gradient, count))
        for device in (0, 1)
    ]
    ready.set()
    for handle in handles:
        np.testing.assert_array_equal(engine.finish(handle), np.full(4, 2))
    assert next(dtype for source, dtype in sent if source == 0) == np.int32


def test_a_process_that_no_other_calls_gives_up(monkeypatch):
    monkeypatch.setattr(post, "_CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MeshError, match=r"process 3 did not call 127\.0\.0\.1 within 0\.05 s"):
            post._accept_from(server, "127.0.0.1", 7, {3, 4})
    with pytest.raises(MeshError, match=rf"process 1 does not answer at 127\.0\.0\.1:{port}"):
        post._connect_to("127.0.0.1", port, 1)


def test_strangers_who_call_keep_no_process_out():
    """They leave at once, or send too little, or have another secret; and process 1 has begun to send."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection(server.getsockname())) for _ in range(6)]
        callers[0].close()
        callers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        callers[2].sendall(b"GET /")
        callers[3].sendall(post._HELLO.pack(1, 8))
        callers[4].sendall(post._HELLO.pack(5, 7))
        callers[5].sendall(post._HELLO.pack(1, 7) + b"content")
        found = post._accept_from(server, "127.0.0.1", 7, {1})
        assert found.keys() == {1}
        with found[1] as connection:
            assert connection.getpeername() == callers[5].getsockname()
            assert connection.recv(100) == b"content"


def test_who_waits_for_a_process_that_ends_is_reported(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(post, "_connections", lambda: {1: ours})
    box = P2PTransport((0, 1))
    reported = []

    def wait():
        try:
            box.receive(MessageTag(1, 0, 0, 0))
        except ConnectionError as error:
            reported.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    theirs.close()
    waiting.join(timeout=30)
    assert reported == ["process 1 is gone: it closed the connection"]
    box.send(MessageTag(0, 1, 0, 0), np.zeros(2**20))  # who sends is not held up
    ours.close()


@pytest.mark.parametrize("name", ["algorithm", "reduction"])
def test_other_devices_have_collectives_of_their_own(name):
    config = small_config(2, 4, exchange={name: "background"})
    assert exchange_of(config, "cpu", 1)
    with pytest.raises(ConfigError, match=f"exchange.{name}=background is for CPUs, and these devices are tpu"):
        exchange_of(config, "tpu", 1)
