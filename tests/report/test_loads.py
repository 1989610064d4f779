"""What is drawn of the load of experts and of ranks: the values of the records, and where experts changed ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_jax.errors import UserError
from moe_jax.report import load_figure, write_report
from moe_jax.report.load_plots import LOAD_LIMIT, RankMove, experts_svg, loads_of
from moe_jax.telemetry.run_log import FILE_NAME

EVERY = 50  # steps between two checks


def run_in(folder: Path, blocks: int, experts: int, moves: dict[int, list[int]], steps: int = 300) -> Path:
    """A run that looked at the load of ranks, which fell from 2.4 to 1.05 where experts of a block had moved."""
    rng, moved = np.random.default_rng(0), set()
    records: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        share = rng.dirichlet(np.linspace(20, 60, experts), blocks)
        records.append({"step": step, "loss": 1 / step, "expert_load": share.round(6).tolist()})
        if step % EVERY:
            continue
        look = {"step": step, "rank_load": [1.05 if m in moved else (240 + m) / 100 for m in range(blocks)]}
        if step in moves:
            moved |= set(moves[step])
            swaps, after = [3] * len(moves[step]), [1.01] * len(moves[step])
            look |= {"migrated_blocks": moves[step], "migration_swaps": swaps, "migration_load_after": after}
        records.append(look)
    folder.mkdir(exist_ok=True)
    (folder / FILE_NAME).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def records_in(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / FILE_NAME).read_text().splitlines()]


def lines_of(axes: Any) -> list[float]:
    """Steps that are marked."""
    return [line.get_xdata()[0] for line in axes.lines]


MOVES = {100: [0, 1], 200: [1]}


@pytest.mark.parametrize(("blocks", "experts"), [(2, 8), (24, 64), (27, 16)])
def test_a_figure_draws_the_load_of_each_expert_and_marks_moves(blocks: int, experts: int, tmp_path: Path) -> None:
    run = run_in(tmp_path, blocks, experts, moves=MOVES)
    ranks, *panels, bar = [axes for part in load_figure(run).subfigs for axes in part.axes]
    share_RME = np.array([record["expert_load"] for record in records_in(run) if "expert_load" in record])
    assert [axes.get_title() for axes in panels] == [f"MoE block {block}" for block in range(blocks)]
    for block, axes in enumerate(panels):
        (image,) = axes.collections
        np.testing.assert_allclose(image.get_array(), share_RME[:, block].T * experts)
        assert image.get_clim() == (0, LOAD_LIMIT), "all blocks have the same colours, even in their middle"
        np.testing.assert_allclose(image.get_coordinates()[0, :, 0], np.arange(5, 310, 10))
        assert lines_of(axes) == [step for step, moved in MOVES.items() if block in moved]
    assert bar.get_xlabel() == "load / even share"
    assert lines_of(ranks) == [100, 200]
    assert ranks.get_title() == f"{2.39 + min(blocks, 2) / 100:.2f} → 1.05 at step 100, 1.05 → 1.05 at step 200"


def test_the_load_of_ranks_is_drawn_over_the_steps_that_it_was_seen_in(tmp_path: Path) -> None:
    ranks = load_figure(run_in(tmp_path, 3, 8, moves={100: [0, 2]})).subfigs[0].axes[0]
    band, worst = (patch.get_data() for patch in ranks.patches)
    np.testing.assert_allclose(worst.edges, np.arange(0, 301, EVERY))
    np.testing.assert_allclose(worst.values, [2.42, 2.42, *[2.41] * 4])
    np.testing.assert_allclose(band.baseline, [2.4, 2.4, *[1.05] * 4])
    assert ranks.get_title() == "2.42 → 1.05 at step 100"


def test_a_move_is_reported_by_the_worst_block_whose_experts_moved(tmp_path: Path) -> None:
    run = run_in(tmp_path, 3, 8, moves={100: [0, 1], 300: [2]})
    loads = loads_of(records_in(run))
    assert loads.moves == (
        RankMove(step=100, blocks=(0, 1), pairs=6, before=2.41, planned=1.01, after=1.05),
        RankMove(step=300, blocks=(2,), pairs=3, before=2.42, planned=1.01, after=None),
    )
    page = write_report(run).read_text()
    assert page.index("Rank load") < page.index("Busiest rank / mean load") < page.index("Expert load")
    for step, reported, blocks in (
        (100, "2.41 → 1.05</td><td>planned 1.01, over the steps up to the next check; 6", "blocks 0, 1"),
        (300, "2.42 → 1.01</td><td>planned 1.01, no check since; 3", "block 2"),
    ):
        assert f"Step {step}</th><td>{reported} pair(s) of experts changed ranks in MoE {blocks}</td>" in page
    panels = page[page.index("<h2>Expert load") :].split("</figure>")
    assert [panel.count("stroke-dasharray") for panel in panels[:3]] == [1, 1, 1]


def test_a_page_lists_the_last_of_many_moves(tmp_path: Path) -> None:
    page = write_report(run_in(tmp_path, 1, 4, {step: [0] for step in range(50, 1501, 50)}, 1500)).read_text()
    assert "<p>The last 20 moves; 10 before them.</p>" in page
    assert page.count("3 pair(s)") == 20


def test_records_without_loads_have_a_page_and_no_figure(tmp_path: Path) -> None:
    """As those of runs from before loads were recorded, and of dense ones."""
    (tmp_path / FILE_NAME).write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n')
    page = write_report(tmp_path).read_text()
    assert "Loss" in page
    assert "Expert load" not in page
    assert "Rank load" not in page
    with pytest.raises(UserError) as error:
        load_figure(tmp_path)
    assert str(error.value) == (
        f"run {tmp_path} has no records of experts: wait until it has trained for log.every steps, or name a run whose "
        "model has experts"
    )


def test_a_heat_map_of_a_long_run_stays_small() -> None:
    load = np.random.default_rng(0).uniform(size=(5_000, 1, 8)).tolist()
    records = [{"step": step, "expert_load": each} for step, each in enumerate(load)]
    assert len(experts_svg(loads_of(records), 0)) < 200_000
