"""The batch size of a plan whose command line gives none."""

import dataclasses
from pathlib import Path

import pytest

from moe_jax.config import Config
from moe_jax.config.draft import open_draft
from moe_jax.config.yaml_io import load_draft
from moe_jax.plan.batch_size import batch_size_of
from moe_jax.plan.candidates import on_meshes
from moe_jax.plan.clusters import find_cluster

FOLDER = Path(__file__).parents[2] / "configs/models"
CLUSTERS = ["h100x1", "h100x8", "h100x72", "h100x512"]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_model_has_a_batch_that_some_mesh_of_any_cluster_divides(file: Path) -> None:
    draft = open_draft(load_draft(file))
    for cluster in map(find_cluster, CLUSTERS):
        batch = batch_size_of(draft, cluster, file.name).sequences
        sized = dataclasses.replace(draft, train=dataclasses.replace(draft.train, batch_size=batch))
        assert any(isinstance(each, Config) for each in on_meshes(sized, cluster))
        if "train.batch_size" not in draft.given:
            assert batch % cluster.devices == 0


@pytest.mark.parametrize(
    ("settings", "cluster", "sequences", "source"),
    [
        ([], "h100x16", 16 * 128, "a.yaml gives none, so each device has 16,384 tokens; any multiple of 16 works"),
        (["data.seq_len=65536"], "h100x16", 16, "a.yaml gives none, so each device has 65,536 tokens; any multiple of"),
        (["train.batch_size=64"], "h100x16", 64, "as in a.yaml"),
        (["train.batch_size=15"], "cpu-6", 15, "as in a.yaml; more meshes are possible with 12, a multiple of the"),
        (["train.batch_size=15"], "cpu-7", 14, "no mesh of 7 devices divides 15, as in a.yaml"),
        (["train.batch_size=1"], "cpu-7", 7, "no mesh of 7 devices divides 1, as in a.yaml"),
        (["train.batch_size=15", "model.moe.top_k=99"], "cpu-7", 15, "as in a.yaml"),
        (["train.batch_size=15", "optimizer.name=sgd"], "cpu-6", 15, "as in a.yaml"),
    ],
)
def test_the_batch_is_the_files_or_a_number_of_tokens_per_device(
    settings: list[str], cluster: str, sequences: int, source: str
) -> None:
    draft = open_draft(load_draft(None, ["data.seq_len=128", "model.num_layers=2", *settings]))
    found = batch_size_of(draft, find_cluster(cluster), "a.yaml")
    assert found.sequences == sequences
    assert found.source.startswith(source)
    assert ("no mesh" in found.source) == source.startswith("no mesh"), "other reasons than the batch are not the batch"
