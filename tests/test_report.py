"""The report: one page that needs nothing else, for every kind of run."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_jax.config import Config
from moe_jax.config.yaml_io import to_yaml
from moe_jax.errors import UserError
from moe_jax.report import write_report
from moe_jax.report.alarms import alarm_text
from moe_jax.report.html import CSS
from moe_jax.report.load_plots import experts_svg, loads_of, ranks_svg
from moe_jax.report.plots import MAX_POINTS, PlotLine, curves_svg, thin
from moe_jax.telemetry.run_log import RunLog, insert_record

EVERYWHERE = ["Key numbers", "Loss", "Optimisation", "Speed"]
SECTIONS = [*EVERYWHERE, "Balance", "Expert load", "Sample", "Config", "Provenance"]


class Page(HTMLParser):
    """What a browser would see: headings, plots, tables, and everything it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.inside = ""
        self.loaded: list[str] = []
        self.texts: dict[str, list[str]] = {"h2": [], "figcaption": [], "pre": [], "td": [], "th": [], "p": []}
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.inside = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.texts:
            self.texts[self.inside][-1] += data

    def row(self, name: str) -> list[str]:
        at = self.texts["th"].index(name)
        return self.texts["td"][2 * at : 2 * at + 2]


def make_run(folder: Path, steps: int = 60, blocks: int = 3, validate: bool = True, **changes: Any) -> Path:
    """A run that logged every step; `changes` hold for every record."""
    with RunLog(folder, 0, steps, tokens_per_step=8192, tensorboard=False, quiet=False) as log:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": 1.5 + math.exp(-step / 10),
                "cross_entropy": 1.4 + math.exp(-step / 10),
                "learning_rate": 1e-3,
                "grad_norm": 0.4,
                "tokens_per_s": 41_234.0,
                "step_s": 0.2,
                "mfu": 0.38,
                "expert_load": [[0.5, 0.2, 0.2, 0.1]] * blocks,
            }
            balance = {"load_balance_loss": 1.1, "dropped_fraction": 0.004, "load_max_over_mean": 2.0}
            log.write(record | (balance if blocks else {}) | changes)
            if validate and step % 20 == 0:
                log.write({"step": step, "validation_loss": [1.7, 1.6, 1.65][step // 20 % 3]})
    return folder


def add_files(run: Path) -> Path:
    (run / "config.yaml").write_text(to_yaml(Config()), encoding="utf-8")
    (run / "sample.txt").write_text('Enter <script src="http://x.example/">ROMEO</script> & \x00JULIET\n')
    (run / "provenance.json").write_text(json.dumps({"versions": {"jax": "0.10.2"}, "command": "train <b>"}))
    return run


def test_page_holds_every_section_and_loads_nothing(tmp_path: Path) -> None:
    path = write_report(add_files(make_run(tmp_path)))
    page = Page(path)
    assert path == tmp_path / "report.html"
    assert page.texts["h2"] == SECTIONS
    assert [caption for caption in page.texts["figcaption"] if caption.startswith("MoE block")] == [
        f"MoE block {block}" for block in range(3)
    ]
    assert page.tags.count("svg") == len(page.texts["figcaption"]) == 12
    assert page.loaded
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in page.loaded)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    without_texts = re.sub(r"<pre>.*?</pre>", "", page.source, flags=re.DOTALL)
    assert not re.search(r"https?:|//|@import", without_texts.replace("</", "<"))


def test_texts_of_the_run_are_shown_and_cannot_become_markup(tmp_path: Path) -> None:
    page = Page(write_report(add_files(make_run(tmp_path))))
    sample, config = page.texts["pre"]
    assert sample == 'Enter <script src="http://x.example/">ROMEO</script> & �JULIET\n'
    assert config == to_yaml(Config())
    assert page.texts["th"][-2:] == ["versions.jax", "command"]
    assert page.texts["td"][-2:] == ["0.10.2", "train <b>"]


def test_key_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path)))
    assert page.row("Best validation loss") == ["1.600", "2.308 bits per token, at step 20"]
    assert page.row("Last validation loss") == ["1.700", "2.453 bits per token, at step 60"]
    assert page.row("Final training loss") == ["1.502", "cross-entropy 1.402, at step 60"]
    assert page.row("Tokens seen") == ["492k", "in 60 steps"]
    assert page.row("Tokens per second")[0] == "41.2k"
    assert page.row("Step time") == ["200 ms", "median; 80% of records from 200 ms to 200 ms; last 200 ms"]
    assert page.row("MFU")[0] == "38.0%"
    assert page.row("Dropped share")[0] == "0.4%"
    assert page.row("Load max/mean")[0] == "2.00"


def test_alarms_and_failed_saves_are_on_the_page_and_in_the_text(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert alarm_text(run) == ""
    lost = "the checkpoint of step 62 was not saved (no room on the disk), none is there yet: free some space"
    with RunLog(run, 60, 100, tokens_per_step=8192, tensorboard=False, quiet=False) as log:
        log.write({"step": 61, "alarm": "block 1: <unused>"})
        log.alarm(62, lost, failed_saves=1)
        log.write({"step": 63, "alarm_over": "block 1 has recovered"})
        log.write({"step": 20, "back_from_step": 64})
    page = Page(write_report(run))
    assert page.texts["h2"] == [SECTIONS[0], "Alarms", *SECTIONS[1:6]]
    wanted = {
        "step 61": "block 1: <unused>",
        "step 62": lost,
        "step 63": "over: block 1 has recovered",
        "step 20": "went back to this step from step 64, as training had diverged",
    }
    for name, text in wanted.items():
        assert text in page.texts["td"]
        assert name in page.texts["th"]
    assert "1 checkpoints were not saved." in page.texts["p"]
    assert alarm_text(run) == "\n".join(["alarms of the run:", *(f"  {name}: {text}" for name, text in wanted.items())])


def test_of_many_alarms_the_last_ones_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1, validate=False)
    with RunLog(run, 1, 200, tokens_per_step=8192, tensorboard=False, quiet=False) as log:
        for step in range(2, 152):
            log.alarm(step, f"trouble {step}")
    page = Page(write_report(run))
    reported = [text for text in page.texts["td"] if text.startswith("trouble")]
    assert reported == [f"trouble {step}" for step in range(52, 152)]
    assert "The last 100 of 150." in page.texts["p"]
    assert alarm_text(run).splitlines()[1:3] == ["  … and 145 before, see the page", "  step 147: trouble 147"]


def test_dense_run_has_no_expert_panels(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path, blocks=0)))
    assert page.texts["h2"] == EVERYWHERE
    assert "Load max/mean" not in page.texts["th"]


def test_run_without_validation_has_its_training_curve(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path, validate=False)))
    assert page.texts["h2"] == SECTIONS[:6]
    assert "Best validation loss" not in page.texts["th"]


def test_each_source_of_a_mixture_has_its_validation_curve(tmp_path: Path) -> None:
    run, without = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as records:
        for step, loss in ((40, 2.5), (60, 2.25)):
            record = {"step": step, "validation_loss": 2, "validation_loss/web": loss, "tokens": step}
            records.write(json.dumps(record) + "\n")
    lines = [write_report(each).read_text(encoding="utf-8").count("stroke-dasharray: 1.3") for each in (run, without)]
    assert lines[0] > lines[1]


def test_run_of_one_record_has_all_its_plots(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path, steps=1)))
    assert page.texts["h2"] == SECTIONS[:6]
    assert page.row("Step time") == ["200 ms", "one record"]


def test_run_that_was_only_evaluated_has_a_page(tmp_path: Path) -> None:
    with RunLog(tmp_path, 0, 10, tokens_per_step=64, tensorboard=False, quiet=False) as log:
        log.write({"step": 0, "validation_loss": 5.5})
    assert Page(write_report(tmp_path)).texts["h2"] == ["Key numbers", "Loss"]


def test_evaluations_are_listed_by_step_text_and_options(tmp_path: Path) -> None:
    make_run(tmp_path)
    for loss, options in ((9.0, ""), (2.5, ""), (2.4, "--ema")):  # the first one is repeated
        values = {"evaluation/a.txt/loss": loss, "evaluation/a.txt/tokens": 1200, "evaluation_options": options}
        insert_record(tmp_path, {"step": 20, **values})
    insert_record(tmp_path, {"step": 60, "evaluation/validation/web/loss": math.nan})
    page = Page(write_report(tmp_path))
    assert page.texts["h2"] == ["Key numbers", "Evaluations", *SECTIONS[1:6]]
    assert re.findall(r"<td>(a.txt|validation/web)</td><td>([^<]*)</td><td>([^<]*)</td>", page.source) == [
        ("a.txt", "loss 2.5, tokens 1,200", ""),
        ("a.txt", "loss 2.4, tokens 1,200", "--ema"),
        ("validation/web", "loss not finite", ""),
    ]
    assert page.row("Tokens seen") == ["492k", "in 60 steps"]


def test_diverged_run_reports_it(tmp_path: Path) -> None:
    nan = float("nan")
    page = Page(write_report(make_run(tmp_path, loss=nan, cross_entropy=nan, expert_load=[[nan, nan]])))
    assert "The training loss is not finite in 60 records, first at step 1." in page.texts["p"]
    assert page.row("Final training loss") == ["nan", "cross-entropy nan, at step 60"]


def test_curve_of_a_long_run_stays_small() -> None:
    rng = np.random.default_rng(0)
    steps, values = np.arange(50_000.0), rng.normal(size=50_000)
    svg = curves_svg("Loss", [PlotLine(steps, values)])
    assert 100 < svg.count("\nL ") < 2 * MAX_POINTS


def test_thinning_keeps_the_mean_and_shows_where_values_are_missing() -> None:
    values = np.arange(10_000.0)
    thinned = thin(values, 100)
    assert len(thinned) == 100
    assert thinned.mean() == pytest.approx(values.mean())
    values[4_200] = np.nan
    assert np.flatnonzero(np.isnan(thin(values, 100))).tolist() == [42]
    assert thin(values, 10_000) is values


def test_plots_take_their_colours_from_the_page_so_that_both_themes_can_read_them() -> None:
    steps = np.arange(3.0)
    loads = loads_of([{"step": 1, "expert_load": [[0.5, 0.5]]}, {"step": 2, "rank_load": [1.5, 1.2]}])
    for svg in (
        curves_svg("Loss", [PlotLine(steps, steps, "a"), PlotLine(steps, steps, "b")]),
        experts_svg(loads, 0),
        ranks_svg(loads),
    ):
        assert not re.search(r"#[0-9a-f]{6}(?![0-9a-f])", svg)
        assert "var(--muted)" in svg
    assert "prefers-color-scheme: dark" in CSS
    for variable in ("ink", "muted", "grid", "series-1", "series-2"):
        assert CSS.count(f"--{variable}: #") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moe", "run {folder}/moe does not exist: give the folder that a run has as log.dir"),
        ("other", "{folder}/other is not a run (no metrics.jsonl in it): give the folder that a run has as log.dir"),
        ("empty", "run {folder}/empty has no records yet: wait until it has trained for log.every steps"),
        ("odd", "{folder}/odd/provenance.json is not a JSON object: delete the file, the report does without it"),
        ("taken", "{folder}/taken/report.html cannot be written (Is a directory): make the folder writable"),
    ],
)
def test_what_cannot_be_reported_is_answered_with_a_cure(tmp_path: Path, name: str, message: str) -> None:
    for folder in ("other", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    (make_run(tmp_path / "odd", steps=1) / "provenance.json").write_text("[")
    (make_run(tmp_path / "taken", steps=1) / "report.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        write_report(tmp_path / name)
    assert str(error.value) == message.format(folder=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_matplotlib_is_answered_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError) as error:
        write_report(make_run(tmp_path))
    assert str(error.value) == "plots need matplotlib, which is not installed: pip install -e '.[plots]'"
    assert not (tmp_path / "report.html").exists()


def test_command_writes_the_page_without_jax(tmp_path: Path) -> None:
    make_run(tmp_path)
    program = (
        "import sys; sys.modules['jax'] = None\nimport runpy; runpy.run_module('moe_jax.report', run_name='__main__')"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr, run.returncode) == (f"wrote {tmp_path}/report.html\n", "", 0)


def test_command_answers_a_wrong_folder_with_one_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "moe_jax.report", str(tmp_path / "moe")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr == f"error: run {tmp_path}/moe does not exist: give the folder that a run has as log.dir\n"
