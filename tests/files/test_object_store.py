"""Folders in object stores: what is read is what was written, and conditions hold."""

from pathlib import Path

import pytest

from moe_jax.files import object_store
from moe_jax.files.object_store import ABSENT, ObjectFolder, StoreError, is_outage
from tests.object_server import Server

BOTH = pytest.mark.parametrize("served", ["gs", "s3"], indirect=True)


@pytest.fixture
def folder(store: Server) -> ObjectFolder:
    return ObjectFolder(f"{store.bucket}/a")


@BOTH
def test_objects_are_written_read_listed_and_deleted(store: Server, folder: ObjectFolder) -> None:
    for name in ("x", "b/y z+#?%é", "b/z", "bc"):
        folder.write(name, name.encode())
    store.objects["ab"] = (1, b"of another folder")
    assert folder.names() == ["b/y z+#?%é", "b/z", "bc", "x"]
    assert folder.names("b/") == ["b/y z+#?%é", "b/z"]
    assert folder.read("b/y z+#?%é").decode() == "b/y z+#?%é"
    assert folder.read("b/z", 1, 3) == b"/z"
    assert [folder.has("b/z", size) for size in (0, 3, 4)] == [True, True, False]
    assert not folder.has("none")
    with pytest.raises(StoreError, match=rf"^{folder}/none: it does not exist: name another one, or make the"):
        folder.read("none")
    folder.delete(["x", "none"])
    assert "a/x" not in store.objects
    folder.check(writes=True)
    assert len(folder.names()) == 3, "the check leaves nothing"


@BOTH
def test_a_write_with_a_condition_is_made_once(store: Server, folder: ObjectFolder) -> None:
    assert folder.read_versioned("x") == (None, ABSENT)
    first = folder.write_if(ABSENT, "x", b"1")
    assert first
    assert folder.write_if(ABSENT, "x", b"2") is None
    second = folder.write_if(first, "x", b"3")
    assert folder.write_if(first, "x", b"4") is None
    assert folder.read_versioned("x") == (b"3", second)
    assert folder.write_if(first, "x", None) is None
    assert folder.read("x") == b"3"
    folder.write_if(folder.generation("x"), "x", None)
    assert not store.objects


@BOTH
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 20])
def test_an_object_is_downloaded_in_parts(
    size: int, store: Server, folder: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 8)
    store.objects["a/x"] = (5, bytes(range(size)))
    folder.download("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == bytes(range(size))


@BOTH
def test_requests_that_fail_or_are_cut_off_are_made_again(store: Server, folder: ObjectFolder) -> None:
    folder.write("x", content := bytes(range(100)))
    store.next_faults += ["cut", "unavailable"]
    assert folder.read("x") == content
    assert not store.next_faults, "or this test shows nothing"


@BOTH
def test_a_bucket_that_does_not_exist_and_a_store_that_does_not_answer(
    store: Server, folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = ObjectFolder(f"{store.bucket.replace('bucket', 'no-bucket')}/a")
    with pytest.raises(StoreError) as refused:
        nowhere.check(writes=True)
    where = nowhere if store.bucket.startswith("s3") else nowhere / ".moe_jax_can_write"  # S3 refuses only the list
    assert str(refused.value) == f"{where}: it does not exist: name another one, or make the bucket no-bucket"
    assert not is_outage(refused.value)
    monkeypatch.setattr(object_store, "FIRST_ANSWER_S", 0.3)
    store.faults = {"unavailable": 1.0}
    with pytest.raises(StoreError) as refused:
        folder.check(writes=False)
    assert str(refused.value) == (
        f"{folder}/.moe_jax_can_write: no answer in 0.3 s: check the name and the network, and "
        + object_store._LOGIN[folder.url[:2]]
    )
    assert is_outage(refused.value)


def test_amazons_own_variables_choose_endpoint_region_and_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    folder, found = ObjectFolder("s3://bucket/a/b"), {"driver": "s3", "bucket": "bucket", "path": "a/b/"}
    found["s3_request_retries"] = {"max_retries": 10}
    assert folder.spec() == found | {"aws_credentials": {"type": "imds"}}
    (tmp_path / "config").touch()
    assert folder.spec() == found | {"aws_credentials": {"type": "default"}}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    environment = {"aws_credentials": {"type": "environment"}}
    assert folder.spec() == found | environment | {"endpoint": "http://localhost:9000", "aws_region": "us-east-1"}
