"""A bucket of Google Cloud Storage, served in memory to tensorstore's own driver."""

from collections.abc import Iterator

import pytest

from moe_jax import paths
from moe_jax.files import local_copy, object_store
from tests.gcs_server import Server, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, serving() as server:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        object_store._opened.cache_clear()
        yield server
        object_store._opened.cache_clear()


@pytest.fixture
def store(served: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server without objects, in a process that has no copies yet."""
    monkeypatch.setattr(local_copy, "_copies", {})
    monkeypatch.setattr(local_copy, "_outlines", {})
    monkeypatch.setattr(paths, "COPIES", copies := {})
    monkeypatch.setattr(local_copy, "COPIES", copies)
    served.objects.clear()
    yield served
    served.faults.clear()
    served.lost.clear()
    served.next_faults.clear()
