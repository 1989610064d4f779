"""Files of others: how large they may be, and how deep."""

from pathlib import Path

import pytest

from moe_jax.files.untrusted import MOST_DEPTH, parse_json, read_bytes


def test_a_file_of_too_many_bytes_is_refused(tmp_path: Path) -> None:
    """None is cut off."""
    file = tmp_path / "some.json"
    for size in (0, 9, 10):
        file.write_bytes(b"x" * size)
        assert read_bytes(file, most=10) == b"x" * size
    for size in (11, 100):
        file.write_bytes(b"x" * size)
        with pytest.raises(OSError, match="it has more than 10 bytes"):
            read_bytes(file, most=10)


@pytest.mark.parametrize("opened", ["[", '{"a": '])
def test_json_that_is_nested_too_deep_is_refused(opened: str) -> None:
    """Also where Python's own reader goes that far."""
    closed = "]" if opened == "[" else "}"

    def nested(depth: int) -> str:
        return opened * (depth - 1) + opened[0] + closed * depth

    assert parse_json(nested(MOST_DEPTH))
    for depth in (MOST_DEPTH + 1, 10 * MOST_DEPTH, 10**5):
        with pytest.raises(ValueError, match=f"it is nested more than {MOST_DEPTH} deep"):
            parse_json(nested(depth))
