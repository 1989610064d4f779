"""A bucket of a store, served in memory to tensorstore's own driver."""

from collections.abc import Iterator

import pytest

from moe_jax import paths
from moe_jax.files import local_copy, object_store
from tests.gcs_server import GcsHandler
from tests.object_server import Server, serving
from tests.s3_server import S3Handler

_HANDLERS = {handler.scheme: handler for handler in (GcsHandler, S3Handler)}


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server of a store, of Google's unless a test names another one."""
    with pytest.MonkeyPatch.context() as patch, serving(_HANDLERS[getattr(request, "param", "gs")]) as server:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        object_store._opened.cache_clear()
        yield server
        object_store._opened.cache_clear()


@pytest.fixture
def store(served: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server without objects, in a process that has no copies yet."""
    monkeypatch.setattr(local_copy, "_copies", {})
    monkeypatch.setattr(local_copy, "_outlines", {})
    monkeypatch.setattr(local_copy, "_outputs", {})
    monkeypatch.setattr(paths, "COPIES", copies := {})
    monkeypatch.setattr(local_copy, "COPIES", copies)
    served.objects.clear()
    yield served
    served.faults.clear()
    served.lost.clear()
    served.next_faults.clear()
