"""Every number in a table of README.md and docs/ stands in a results file, or below with the reason why it does not.

Of sentences only those in `sentences.py` are compared with results."""

import pytest

from tests.numbers.docs import TABLES
from tests.numbers.pages import numbers_in, pages, path_of, tables_of
from tests.numbers.results_page import COMPILED, ON_CPUS, PREDICTED
from tests.numbers.sentences import SENTENCES

EXPECTED = [
    ("results.md", "| on CPUs: ", ON_CPUS),
    ("results.md", "| compiled for |", COMPILED),
    ("results.md", "| predicted |", PREDICTED),
    *TABLES,
]

# Pieces of a head, or of a row's first cell, and what its numbers are.
SETTING = "settings, formulas, names and versions: no results"
NO_PROGRAM = "timed or counted by hand, once; no program makes it again"
OTHER = {
    "*": {
        "| setting |": SETTING,
        "| message |": SETTING,
        "| cited as |": SETTING,
        "| what happens | what follows |": SETTING,
        "| file | content |": SETTING,
    },
    "README.md": {"| feature |": SETTING, "| system |": "what the pages of those projects report"},
    "architecture.md": {"| factor |": NO_PROGRAM, "| | plain | scheduled |": SETTING},
    "bad_numbers.md": {"| key |": SETTING, "| temporaries, MB |": NO_PROGRAM},
    "checkpoints.md": {"| the lock is of |": SETTING},
    "compiled.md": {
        "| step of `configs/bench/fine_grained.yaml` |": "tests/test_same_program.py",
        "| compiled for | ragged": "tests/test_same_program.py",
    },
    "data.md": {"| file | documents |": SETTING, "| 94 MB of text |": NO_PROGRAM},
    "balance.md": {
        "| `load_balancing_type` |": SETTING,
        "| | validation loss |": "tests/test_balance_results.py",
        "| 300 steps |": "measured once; no program makes it again",
    },
    "clusters.md": {"| where |": "versions that were tried", "| torchrun |": SETTING, "| engine |": SETTING},
    "convert.md": {
        "| `quantization_config` |": SETTING,
        "| | |": SETTING,
        "| `model_type` |": SETTING,
    },
    "evaluate.md": {"| option |": SETTING},
    "exchange.md": {
        "| `exchange.algorithm` |": SETTING,
        "| mesh |": SETTING,
        "| implementation |": "what the linked reports measured",
    },
    "fully_sharded.md": {
        "| | meshes |": "tests/test_plan_figures.py",
        "| mesh | `vanilla` |": "tests/test_sharded_losses.py",
    },
    "generate.md": {"| option |": SETTING},
    "getting_started.md": {"| platform |": SETTING},
    "gates.md": {"| gate | scores": SETTING},
    "gpu.md": dict.fromkeys(("| step |", "| grouped products", "| operations of"), "tests/test_bench_gpu.py"),
    "log.md": {
        "| `unified` |": NO_PROGRAM,
        "| milliseconds of cycle estimates |": NO_PROGRAM,
        "| | before |": NO_PROGRAM,
        "| | CPU seconds": NO_PROGRAM,
    },
    "measure.md": {
        "| part |": SETTING,
        "| name |": SETTING,
        "| | ours | MaxText |": SETTING,
        "| | begins at": NO_PROGRAM,
    },
    "migration.md": dict.fromkeys(("| | |", "| | measured |", "| processes with"), "tests/test_balance_results.py"),
    "models.md": {"| settings |": SETTING, "| product |": SETTING},
    "optimizers.md": {
        "| `optimizer.name` |": SETTING,
        "| `optimizer.schedule` |": SETTING,
        "| | 0.0001 |": "tests/step/test_optimizers.py",
    },
    "pipelines.md": {
        "| schedule |": SETTING,
        "| | step, s |": "tests/test_pipeline_results.py",
    },
    "plan.md": {
        "| printed | meaning |": SETTING,
        "| `--cluster` | |": SETTING,
        "| | sharded |": SETTING,
        "| | all axes |": "tests/test_plan_figures.py",
        "| links between nodes |": "tests/plan/test_unequal_links.py",
    },
    "published.md": {
        **dict.fromkeys(("| rows, counted", "| run | source |", "| devices | collective |"), "tests/test_published.py"),
        "| has | counted as |": SETTING,
        "| source | |": SETTING,
    },
    "recovery.md": {
        "| kind |": SETTING,
        "| wait for | time-out |": SETTING,
        "| | CPU s |": NO_PROGRAM,
        "copies of one step": "seconds are in results/node_loss.json; the bytes a run prints",
    },
    "results.md": {
        "quickstart in an empty clone": NO_PROGRAM,
        "planning DeepSeek-V3": "tests/test_plan_figures.py",
    },
    "scaling.md": {"| model |": "tests/test_docs.py"},
    "scope.md": {"| part |": SETTING, "| missing |": SETTING},
    "security.md": {"| who listens |": SETTING},
    "troubleshooting.md": {"| exit code |": SETTING},
    "tune.md": {"| `tune.over` |": SETTING},
}


def reason_of(page: str, head: str, first: str) -> str | None:
    """Why no results file has a row."""
    others = OTHER["*"] | OTHER.get(page, {})
    return next((why for piece, why in others.items() if piece in head or piece in first), None)


@pytest.mark.parametrize("page", pages())
def test_every_number_of_a_table_stands_in_a_results_file(page: str) -> None:
    for table in tables_of(page):
        for row in table.rows:
            first = row.split(" | ")[0] + " |"
            wanted = [
                numbers
                for of_page, head, rows in EXPECTED
                if of_page == page and head in table.head
                for piece, numbers in rows.items()
                if piece in first
            ]
            if wanted:
                assert [numbers_in(row)] == [numbers.split() for numbers in wanted], row
            elif numbers_in(row):
                assert reason_of(page, table.head, first), f"in no results file: {row}"


def test_every_result_that_is_expected_is_on_its_page() -> None:
    for page, head, rows in EXPECTED:
        firsts = [row.split(" | ")[0] + " |" for table in tables_of(page) if head in table.head for row in table.rows]
        for piece in rows:
            assert sum(piece in first for first in firsts) == 1, (page, head, piece)


def test_every_reason_is_of_a_row() -> None:
    for page, pieces in OTHER.items():
        tables = [table for name in (pages() if page == "*" else [page]) for table in tables_of(name)]
        places = [
            text for table in tables for text in (table.head, *(row.split(" | ")[0] + " |" for row in table.rows))
        ]
        for piece in pieces:
            assert any(piece in text for text in places), (page, piece)


@pytest.mark.parametrize(("page", "piece"), SENTENCES)
def test_a_sentence_states_what_the_results_are(page: str, piece: str) -> None:
    assert piece in " ".join(path_of(page).read_text().split())


def test_numbers_are_found_in_a_row() -> None:
    row = "| `x=3` on 8 H200, [more](docs/a1.md) | 1,530.5 MB, 0.97–1.04 ×, −4.4 %, 2.3e-7, 2·10⁻⁴, 8-bit, 1F1B, v5p |"
    assert numbers_in(row) == ["8", "1,530.5", "0.97", "1.04", "4.4", "2.3e-7", "2"]
