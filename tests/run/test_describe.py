"""What a run says of itself before it starts."""

import dataclasses

import jax
import pytest

from moe_jax.config import (
    Config,
    DataConfig,
    MambaConfig,
    MeshConfig,
    MigrationConfig,
    OptimizerConfig,
    TrainConfig,
    TuneConfig,
)
from moe_jax.config.attention_kernels import HOPPER
from moe_jax.config.sections import DataSource
from moe_jax.measure.temporaries import Temporaries
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.memory import step_memory
from moe_jax.run import describe
from moe_jax.run.describe import (
    attention_text,
    blocks_text,
    loop_text,
    pipeline_text,
    router_text,
    shares_text,
    temporaries_text,
)
from moe_jax.run.unused_settings import unused
from moe_jax.schedule.pipelines.build import make_table
from tests.small import small_config

ALONE = MeshConfig(data=1).sizes


def test_a_pipeline_reports_what_is_kept_and_idle_and_hints_at_more_microbatches() -> None:
    few, enough = (pipeline_text(make_table("1f1b", 2, parts)) for parts in (1, 2))
    assert "1 microbatches; at once the stages keep activations of 1, 1; idle 50% of the time" in few
    assert few.endswith("(fewer microbatches than stages: train.grad_accumulation=2 or more idles less)")
    assert enough.endswith("after each of 6 ticks")


def test_blocks_are_reported_for_each_stage() -> None:
    config = small_config(1, 1, pipeline=2, moe_layer_freq=1, model={"num_layers": 4}, schedule={"head_blocks": 2})
    assert blocks_text(config) == "moe moe moe moe (3 + 1 on the stages)"
    assert blocks_text(small_config(1, 1)) == "dense moe"


def test_blocks_of_a_mixer_alone_are_reported_by_its_name() -> None:
    places = {"attn_layer_period": 4, "attn_layer_offsets": (2, 3), "mixer_only_offsets": (1, 2)}
    model = {"num_layers": 4, "mamba": MambaConfig(num_heads=4, **places)}
    assert blocks_text(small_config(1, 1, moe_layer_freq=1, model=model)) == "mamba+moe mamba attention moe"


def test_a_router_that_the_loss_does_not_teach_is_reported() -> None:
    for settings, silent in (
        ({"top_k": 1, "norm_top1_prob": True}, False),
        ({"top_k": 1, "gate": "gpt_oss"}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2, "gate": "gpt_oss"}, True),
    ):
        text = router_text(small_config(1, 1, **settings)).get("router", "")
        assert ("the loss gives the router no gradient" in text) != silent, settings


def test_a_router_that_chooses_whatever_the_tokens_is_reported() -> None:
    assert router_text(small_config(1, 1, gate="balanced"))["router"].endswith("for measuring speed, not for a model")


def test_temporaries_that_count_gaps_twice_are_reported_as_a_bound() -> None:
    assert temporaries_text(Temporaries(2_770_000_000, False)) == "2.8 GB per device, as compiled"
    bound = temporaries_text(Temporaries(4_300_000_000, True))
    assert bound == "at most 4.3 GB per device, as compiled, which counts gaps twice"


def test_ranks_of_different_speed_are_reported() -> None:
    slow = dataclasses.replace(find_cluster("cpux2"), speeds=((1, 1.0), (1, 0.5)))
    config = small_config(1, 2, capacity_factor=None)
    assert shares_text(config, None) == {}
    for speeds, words in (((1.0, 0.5), "6, 2 of a block on the expert ranks at first"), (None, "equally many")):
        migration = MigrationConfig(enabled=True, replicas=2, rank_speeds=speeds)
        assert shares_text(dataclasses.replace(config, migration=migration), slow)["experts"].startswith(words)


def test_attention_without_a_fused_kernel_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(1, 1)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    assert attention_text(config, mesh) == {}, "on CPUs there is none"
    on_gpus = dataclasses.replace(ComputeConfig.of(config, mesh), platform="gpu")
    monkeypatch.setattr(ComputeConfig, "of", lambda *_: on_gpus)
    monkeypatch.setattr(describe, "capability_of", lambda _: HOPPER)
    assert attention_text(config, mesh) == {
        "attention": "xla, because train.attention_kernel=cudnn computes in bfloat16, and train.compute_dtype=float32"
    }


def test_a_loop_on_a_gpu_reports_what_unrolling_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(1, 1, moe_layer_freq=1, model={"num_layers": 4})
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    assert loop_text(config, mesh) == {}, "on CPUs it saves nothing"
    on_gpus = dataclasses.replace(ComputeConfig.of(config, mesh), platform="gpu")
    monkeypatch.setattr(ComputeConfig, "of", lambda *_: on_gpus)
    assert "with schedule.unroll=4 a step takes about" in loop_text(config, mesh)["loop"]
    unrolled = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, unroll=4))
    assert loop_text(unrolled, mesh) == {}
    assert step_memory(unrolled, "gpu").total < step_memory(config, "gpu").total


def test_settings_without_effect_are_reported() -> None:
    config = small_config(1, 1, schedule={"task_times": "times.json"})
    assert unused(config, ALONE) == {"unused": "schedule.task_times, as schedule.policy=vanilla orders nothing"}
    short = dataclasses.replace(
        small_config(1, 1), train=TrainConfig(steps=20), optimizer=OptimizerConfig(warmup_steps=20)
    )
    assert unused(short, ALONE)["unused"].endswith("as optimizer.warmup_steps=20 leaves none of train.steps=20")
    quick = dataclasses.replace(small_config(1, 1), train=TrainConfig(quick_compile=True))
    assert unused(quick, ALONE)["unused"] == "train.quick_compile, as it needs mesh.cpu_devices and jax below 0.11"
    late = DataConfig(path=None, sources=(DataSource(path="a", weight=1.0, weight_schedule=((100, 0.5),)),))
    assert unused(dataclasses.replace(short, data=late), ALONE)["unused"].endswith(
        "(a) that change after train.steps=20"
    )
    assert unused(small_config(1, 1), ALONE) == {}


def test_sharding_over_one_rank_and_settings_of_no_migration_are_reported() -> None:
    sharded = OptimizerConfig(zero=3, zero_axes=("data", "expert"))
    config = dataclasses.replace(small_config(1, 1), optimizer=sharded)
    assert unused(config, ALONE)["unused"] == "optimizer.zero=3, as the mesh has one rank along data and expert"
    assert unused(config, ALONE | {"expert": 2}) == {}
    still = dataclasses.replace(small_config(1, 1), migration=MigrationConfig(threshold=3.0, replicas=2))
    assert unused(still, ALONE)["unused"] == "migration.threshold and migration.replicas, as migration.enabled=false"
    moving = dataclasses.replace(small_config(1, 2, capacity_factor=None), migration=MigrationConfig(enabled=True))
    assert unused(moving, ALONE | {"expert": 2}) == {}


def test_settings_of_another_kind_of_step_or_model_are_reported() -> None:
    def text(config: Config, **sizes: int) -> str:
        return unused(config, ALONE | sizes).get("unused", "")

    rates = small_config(1, 1, schedule={"device_tflops": 2.0, "link_gb_per_s": 5.0})
    ordered = "schedule.device_tflops and schedule.link_gb_per_s, as schedule.policy=vanilla orders nothing"
    assert text(rates) == ordered
    scheduled = {"policy": "unified", "microbatches": 2}
    assert not text(small_config(1, 1, schedule=scheduled | {"device_tflops": 2.0}))
    stages = small_config(1, 1, pipeline=2, moe_layer_freq=1, schedule={"unroll": 2})
    assert text(stages) == "schedule.unroll, as the blocks of pipelined steps are always unrolled"
    dense = small_config(1, 1, num_experts=0, exchange={"tensor_chunks": 3, "reduction": "ring"})
    assert text(dense, tensor=2).startswith("model.moe.intermediate_size, model.moe.capacity_factor")
    assert text(dense, tensor=2).endswith("and exchange.tensor_chunks, as model.moe.num_experts=0")
    chunks = small_config(1, 1, exchange={"tensor_chunks": 3})
    assert text(chunks, tensor=2) == "exchange.tensor_chunks, as exchange.tensor_form=sharded"
    forms = small_config(1, 1, exchange={"tensor_chunks": 3, "tensor_form": "sharded_chunked"})
    assert text(forms) == "exchange.tensor_form and exchange.tensor_chunks, as no tensor ranks share an expert"
    assert not text(forms, tensor=2)
    gathered = small_config(1, 1, exchange={"context_form": "all_gather"})
    assert text(gathered) == "exchange.context_form, as the mesh has one rank along context"
    assert not text(gathered, context=2)
    buffers = small_config(1, 1, exchange={"rank_capacity_factor": None})
    assert text(buffers) == "exchange.rank_capacity_factor, as model.moe.capacity_factor=1"
    assert not text(small_config(1, 1, exchange={"rank_capacity_factor": None}, capacity_factor=None))
    tuned = dataclasses.replace(small_config(1, 1), tune=TuneConfig(samples=3))
    assert text(tuned) == "tune.samples, as tune.over=[]"
