"""Which grouped product a run takes that leaves it to the machine: the fastest one, timed once for each shape."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config import Config
from moe_jax.measure.interleaved_timing import InterleavedTimes
from moe_jax.models.grouped_matmul import blocks
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run import choose_grouped_matmul as grouped_product
from moe_jax.run.choose_grouped_matmul import (
    MatmulShape,
    Products,
    fastest_of,
    shape_of,
    time_products,
    with_fastest_product,
)
from moe_jax.step.trainer import make_trainer
from tests.small import small_config

ON_GPU = {name: GROUPED_PRODUCTS["gpu"][name] for name in ("blocks", "ragged", "pallas")}
PASSES = ("forward", "dgrad", "wgrad")


def of_each_pass(**seconds: float) -> dict[str, float]:
    return {f"{each} {name}": time_s for each in PASSES for name, time_s in seconds.items()}


SECONDS = of_each_pass(blocks=0.003, ragged=0.002, pallas=0.001)


class Timing:
    """Says that products take so long, and remembers what it was asked."""

    def __init__(self, seconds: dict[str, float], failed: dict[str, str] | None = None) -> None:
        self.reported = InterleavedTimes(seconds, failed or {})
        self.asked: list[tuple[MatmulShape, list[str]]] = []

    def __call__(self, shape: MatmulShape, products: Products) -> InterleavedTimes:
        self.asked.append((shape, list(products)))
        return self.reported


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moe_jax" / "grouped_products.json"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These devices have a GPU's products, and auto times them."""
    monkeypatch.setitem(GROUPED_PRODUCTS, "cpu", ON_GPU)
    monkeypatch.setattr(grouped_product, "_TIMED", ("cpu",))


def config_of(name: str = "auto", **changes: object) -> Config:
    sizes = {"data": 2, "expert": 4, "capacity_factor": None, "intermediate_size": 16}
    config = small_config(**{**sizes, **changes})  # type: ignore[arg-type]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, grouped_product=name))


def chosen(config: Config, timing: Timing) -> str:
    found = with_fastest_product(config, make_mesh(config.mesh), timing)
    assert dataclasses.replace(config, train=found.train) == found, "nothing else changes"
    return found.train.grouped_product


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("fastest", ON_GPU)
def test_the_fastest_is_taken_and_reported(fastest: str, capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing(SECONDS | of_each_pass(**{fastest: 0.0001}))
    config = config_of()
    assert chosen(config, timing) == fastest
    mesh = make_mesh(config.mesh)
    assert timing.asked == [(shape_of(config, mesh, "cpu"), list(ON_GPU))]
    reported = capsys.readouterr().out.splitlines()
    assert reported[0] == f"train.grouped_product={fastest}"
    assert [line.split()[:3] for line in reported[1:]] == [[each, fastest, "100"] for each in PASSES]
    compute = ComputeConfig.of(with_fastest_product(config, mesh, timing), mesh)
    assert compute.product._replace(filled=1.0) == ON_GPU[fastest], "which is what the step computes with"


def test_passes_of_different_kernels_are_put_together_if_their_tiles_agree() -> None:
    shape = MatmulShape(rows=4096, filled=2048, groups=2, width=64, hidden=64, dtype="bfloat16")
    quick = {"forward ragged": 1e-4, "wgrad pallas": 1e-4, "dgrad blocks": 1e-4}
    assert [ON_GPU[name].tile(shape.rows, shape.groups) for name in ON_GPU] == [512, 128, 128]
    assert fastest_of(SECONDS | quick, shape, ON_GPU) == "ragged+pallas+pallas", "blocks has tiles of its own"
    small = shape._replace(rows=256)
    assert fastest_of(SECONDS | quick, small, ON_GPU) == "ragged+blocks+pallas"
    assert fastest_of({"forward pallas": 1.0, "dgrad pallas": 1.0}, small, ON_GPU) is None, "no pass for the weights"


@pytest.mark.usefixtures("timed")
def test_times_are_taken_once_for_each_shape(cache: Path) -> None:
    timing = Timing(SECONDS)
    for batch_size in (8, 16, 8, 16):
        assert chosen(config_of(batch_size=batch_size), timing) == "pallas"
    assert len(timing.asked) == 2
    assert chosen(config_of(), Timing(of_each_pass(blocks=1e-6))) == "pallas", "as it was timed before"
    entries = json.loads(cache.read_text())
    assert entries[0]["of"]["device"] == jax.devices()[0].device_kind
    cache.write_text(json.dumps([{**each, "of": each["of"] | {"device": "another"}} for each in entries]))
    assert chosen(config_of(), Timing(of_each_pass(blocks=1e-6))) == "blocks", "others' times show nothing"


@pytest.mark.usefixtures("timed")
def test_a_damaged_cache_is_timed_again_and_replaced(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.parent.mkdir()
    cache.write_text("{")
    assert chosen(config_of(), Timing(SECONDS)) == "pallas"
    assert "warning: cached times of grouped products cannot be read" in capsys.readouterr().err
    assert json.loads(cache.read_text())[0]["seconds"] == SECONDS


@pytest.mark.usefixtures("timed")
def test_what_does_not_work_is_left_out_and_reported_in_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(config_of(), Timing(of_each_pass(blocks=0.003), {"dgrad pallas": "ValueError: no"})) == "blocks"
    assert capsys.readouterr().out.splitlines() == [
        "train.grouped_product=blocks",
        "  forward  blocks 3.00 ms",
        "  dgrad    blocks 3.00 ms; left out: pallas (ValueError: no)",
        "  wgrad    blocks 3.00 ms",
    ]


@pytest.mark.usefixtures("timed")
def test_where_nothing_works_the_platforms_own_is_taken(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(config_of(), Timing({}, {"forward blocks": "no", "forward ragged": "no"})) == "blocks"
    assert "  forward  none could be timed; left out: blocks (no); left out: ragged (no)" in capsys.readouterr().out
    assert not cache.exists()


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    "config",
    [config_of("ragged"), config_of(capacity_factor=1.0), config_of(num_experts=0, data=8, expert=1)],
    ids=["named", "capacity", "dense"],
)
def test_nothing_is_timed_without_a_question(config: Config) -> None:
    assert with_fastest_product(config, make_mesh(config.mesh), Timing({})) is config


@pytest.mark.usefixtures("timed")
def test_processes_take_what_the_first_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process asks no clock, and reads no file of its own."""
    given = []

    def from_first(giver: int, own: object) -> str:
        given.append((giver, own))
        return "ragged"

    monkeypatch.setattr(grouped_product, "is_main_process", lambda: False)
    monkeypatch.setattr(grouped_product, "from_process", from_first)
    timing = Timing(SECONDS)
    assert chosen(config_of(), timing) == "ragged"
    assert given == [(0, "")]
    assert not timing.asked


def test_on_cpus_nothing_is_timed() -> None:
    config = config_of()
    timing = Timing(SECONDS)
    assert chosen(config, timing) == "auto"
    assert not timing.asked
    assert ComputeConfig.of(config, make_mesh(config.mesh)).grouped_product == "blocks"


def test_the_shape_is_that_of_what_experts_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, groups, widths and type, as a step's experts see them."""
    config = config_of(schedule={"policy": "unified", "microbatches": 2}, batch_size=32)
    mesh = make_mesh(config.mesh)
    seen = []

    def watching(x_SD: jax.Array, w_LDF: jax.Array, size_L: jax.Array, tile: int) -> jax.Array:
        seen.append((x_SD.shape, w_LDF.shape, x_SD.dtype, tile))
        return blocks(x_SD, w_LDF, size_L, tile)

    product = GROUPED_PRODUCTS["cpu"]["blocks"]._replace(forward=watching)
    monkeypatch.setitem(GROUPED_PRODUCTS, "cpu", {"blocks": product})
    trainer = make_trainer(config, mesh)
    batch = jax.ShapeDtypeStruct((32, config.data.seq_len + 1), jnp.int32)
    jax.eval_shape(trainer.step, trainer.state_shapes, batch)
    shape = shape_of(config, mesh, "cpu")
    tile = product.tile(shape.rows, shape.groups)
    room = -(-(shape.rows + shape.groups * (tile - 1)) // tile) * tile
    there = ((room, shape.width), (shape.groups, shape.width, shape.hidden), jnp.dtype(shape.dtype), tile)
    back = ((room, shape.hidden), (shape.groups, shape.hidden, shape.width), jnp.dtype(shape.dtype), tile)
    assert set(seen) == {there, back}
    assert shape.filled == 2 * 12 * 2 * 4 // 8, "2 sequences of 12 tokens, of 2 choices, from 4 ranks, of 8 experts"


def test_products_are_timed_for_real_and_a_wrong_one_is_left_out() -> None:
    """One has larger tiles, one no device here, one does not fit the widths, and one loses a factor."""
    shape = MatmulShape(rows=96, filled=24, groups=2, width=32, hidden=16, dtype="float32")
    own = GROUPED_PRODUCTS["cpu"]["blocks"]
    products = {
        "blocks": own,
        "larger": own._replace(min_tile=64),
        "none here": ON_GPU["pallas"]._replace(dgrad=None, wgrad=None),
        "narrow": own._replace(width_multiple=64, dgrad=None, wgrad=None),
        "wrong": own._replace(forward=lambda *given: 1.1 * blocks(*given), dgrad=None, wgrad=None),
    }
    found = time_products(shape, products)
    assert found.seconds.keys() == of_each_pass(blocks=1, larger=1).keys()
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert "interpret mode" in found.failed["forward none here"]
    assert found.failed["forward narrow"] == "ValueError: widths are no multiples of 64"
    assert found.failed["forward wrong"] == "ValueError: its results differ from those of blocks by 1.0e-01"
    assert len(found.failed) == 3


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ("ragged", True),
        ("pallas+ragged+blocks", True),
        ("hopper", False),
        ("pallas+hopper+blocks", False),
        ("auto", False),
        (None, False),
    ],
)
def test_a_run_that_resumes_keeps_the_product_of_its_checkpoint(
    saved: str | None, kept: bool, timed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again, another one may be the fastest, and losses would not be those of an undisturbed run."""

    def read_record(storage: object, step: int) -> SimpleNamespace:
        if step == 9 or saved is None:
            raise ValueError("damaged")
        return SimpleNamespace(config={"train": {"grouped_product": saved}})

    monkeypatch.setattr(grouped_product, "steps_of", lambda folder: [9, 6, 3])
    monkeypatch.setattr(grouped_product, "read_record", read_record)
    config, timing = config_of(), Timing(SECONDS)
    found = with_fastest_product(config, make_mesh(config.mesh), timing, tmp_path)
    assert found.train.grouped_product == (saved if kept else "pallas")
    assert len(timing.asked) == (not kept)
