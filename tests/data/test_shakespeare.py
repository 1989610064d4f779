"""The text of the first configs: where it is from, and what the script keeps of a play."""

import hashlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_shakespeare_is_the_file_whose_origin_is_written_down() -> None:
    digest = hashlib.sha256((ROOT / "configs/text/shakespeare.txt").read_bytes()).hexdigest()
    assert digest in (ROOT / "configs/text/README.md").read_text()


def test_shakespeare_is_plain_ascii_speeches() -> None:
    text = (ROOT / "configs/text/shakespeare.txt").read_text("ascii")
    assert 900_000 < len(text) < 1_200_000
    assert re.fullmatch(r"[A-Za-z ,.;:?!'()&\n-]+", text), "markup is left"
    speeches = text.removesuffix("\n").split("\n\n")
    assert len(speeches) > 5000
    for speech in speeches:
        speaker, *lines = speech.split("\n")
        assert re.fullmatch(r"[A-Z][A-Za-z& ]+:", speaker)
        assert lines
        assert all(line == line.strip() != "" for line in lines)
    for line in ("To be, or not to be: that is the question:", "Out, damned spot! out, I say!--One: two: why,"):
        assert f"\n{line}\n" in text


def test_directions_scenes_and_markup_leave_nothing_in_a_speech() -> None:
    spec = importlib.util.spec_from_file_location("make_shakespeare", ROOT / "scripts/make_shakespeare.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    markdown = (
        "# A Play\n\n## ACT I\n\n_Enter A and\nB_\n\n**FIRST A**  \nOne ...  \n\n_Exit B_\n\n\nSONG.\n\n**B**  \n"
        "_\\[Aside]_  \n... two,'\\--& c.\n\n_Dies_\n\nThree.\n\n**C**  \n_\\[Bows]_\n\n"
        "Ghost\n\n**of D: & E:**  \nBoo!\n"
    )
    assert script.speeches(markdown) == "FIRST A:\nOne\n\nB:\ntwo,'--&c.\nThree.\n\nGhost of D & E:\nBoo!\n"
