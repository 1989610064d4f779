"""Matrix products by their sizes: their operations, the losses of small ones, and measured curves."""

import dataclasses
import math

import pytest

from moe_jax.config import Config, MeshConfig, TrainConfig
from moe_jax.config.attention_kernels import ATTENTION_TILE, HOPPER, splash_block
from moe_jax.config.sections import AttentionConfig, DeltaNetConfig, LatentConfig, MambaConfig, ModelConfig, MoEConfig
from moe_jax.config.yaml_io import load_config
from moe_jax.models.attention.tiles import of_sequence, ring_of
from moe_jax.plan.attention_times import squares_seconds
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.clusters.hardware import MatrixUnits, Tile
from moe_jax.plan.config_memory import ConfigMemory
from moe_jax.plan.curves import Curve, curve
from moe_jax.plan.device_sizes import sizes_of
from moe_jax.plan.memory import step_memory
from moe_jax.plan.products import Product, block_products, measured_attention, measured_rate, product_seconds
from moe_jax.plan.step_times import Step
from moe_jax.plan.work import computed_keys, context_hops, exchange_bytes, expert_rows, work_of

H100 = PRESETS["h100"].device
TENSOR, EXPERT = 2, 4
LATENT = LatentConfig(kv_lora_rank=64, q_lora_rank=96)
MAMBA = MambaConfig(num_heads=8, head_dim=24, n_groups=2, d_state=40)
DELTA = DeltaNetConfig(num_value_heads=8, num_key_heads=4, key_head_dim=40, value_head_dim=24)


def config_of(model: dict | None = None, **moe) -> Config:
    experts = {"num_experts": 8, "top_k": 2, "intermediate_size": 512, **moe}
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000}
    return Config(
        model=ModelConfig(**(sizes | (model or {})), moe=MoEConfig(**experts)),
        mesh=MeshConfig(data=1, expert=EXPERT, tensor=TENSOR),
        train=TrainConfig(batch_size=8),
    )


@pytest.mark.parametrize(
    "config",
    [
        config_of(),
        config_of(capacity_factor=None, num_shared_experts=2, shared_gate=True),
        config_of({"activation": "gelu"}, dense_residual=True, first_k_dense_replace=1),
        config_of({"latent": LATENT, "num_key_value_heads": None}, num_shared_experts=1),
        config_of({"attention": AttentionConfig(output_gate=True), "delta_net": DELTA}),
        config_of({"delta_net": dataclasses.replace(DELTA, full_attention_interval=None)}),
        config_of({"mamba": dataclasses.replace(MAMBA, attn_layer_period=4, attn_layer_offsets=(1, 2))}),
        config_of({"mamba": MAMBA}),
        config_of(
            {
                "activation": "squared_relu",
                "mamba": dataclasses.replace(
                    MAMBA, attn_layer_period=4, attn_layer_offsets=(1,), mixer_only_offsets=(0,)
                ),
            },
            num_shared_experts=1,
            first_k_dense_replace=2,
        ),
        config_of({"latent": dataclasses.replace(LATENT, q_lora_rank=None), "num_key_value_heads": None}),
    ],
)
def test_products_have_the_operations_of_their_ops(config: Config) -> None:
    """Counted in two ways: by sizes, and by parameters and tokens."""
    products, work = block_products(config, 1024, TENSOR, EXPERT, "gpu"), work_of(config, 1024, "gpu")
    for op, each in products.items():
        assert sum(product.flops for product in each) == pytest.approx(work[op].products), op


def test_gradients_have_the_operations_of_the_product_itself() -> None:
    product = Product(100, 200, 300, 4)
    assert product.towards("B")[:3] == (100, 300, 200)
    assert product.towards("W")[:3] == (200, 100, 300)
    assert product.part(4).towards("W")[:3] == (200, 25, 300)
    assert {product.towards(direction).flops for direction in ("F", "B", "W")} == {product.flops}


def test_a_product_takes_the_waves_of_its_tiles_by_hand() -> None:
    """Ten units with tiles of 10 × 20: 11 tiles are two waves, each of inner size 100 and 25 to start."""
    units = MatrixUnits(10, (Tile(10, 20, 0.5),), 25)
    device = dataclasses.replace(
        H100, units=units, matrix_flops_per_s=1e9, matrix_efficiency=1.0, memory_bytes_per_s=1e18
    )
    waves_s = 2 * 2 * 10 * (10 * 20) * (100 + 25) / (1e9 * 0.5)
    assert product_seconds(device, Product(110, 100, 20)) == pytest.approx(waves_s)
    assert product_seconds(device, Product(101, 100, 20)) == pytest.approx(waves_s), "part of a tile takes all of it"
    # four parts of the inner size on two units each, and a wave of half of them
    split_s = 2 * 10 * (10 * 20) * (100 / 4 + 25) / (1e9 * 0.5)
    assert product_seconds(device, Product(20, 100, 20)) == pytest.approx(split_s)
    memory = dataclasses.replace(device, memory_bytes_per_s=1.0, memory_efficiency=0.5)
    moved = 2 * (110 * 100 + 100 * 20 + 110 * 20)
    assert product_seconds(memory, Product(110, 100, 20)) == pytest.approx(2 * moved)


def rate(product: Product) -> float:
    """The share of H100's rate in large products that a product reaches."""
    return product.flops / product_seconds(H100, product) / (H100.matrix_flops_per_s * H100.matrix_efficiency)


def test_small_and_skinny_products_reach_less_of_the_rate() -> None:
    large = rate(Product(8192, 8192, 8192))
    assert 0.9 < large <= 1
    for small in (Product(16, 4096, 4096), Product(4096, 64, 4096), Product(4096, 4096, 32), Product(130, 4096, 4096)):
        assert rate(small) < 0.75 * large
    rates = [rate(Product(rows, 4096, 1536, 16)) for rows in (16, 64, 256, 1024)]
    assert rates == sorted(rates), "rows of an expert"


def test_rates_follow_the_numbers_that_are_multiplied() -> None:
    def seconds(kind: str, device=H100) -> float:
        return product_seconds(device, Product(8192, 8192, 8192, kind=kind))  # type: ignore[arg-type]

    assert seconds("float32") == pytest.approx(2 * seconds("bfloat16"), rel=0.05)
    assert seconds("exact") > 10 * seconds("bfloat16")
    assert seconds("fp8") == pytest.approx(seconds("bfloat16") / 2, rel=0.05)
    a100 = PRESETS["a100"].device
    assert seconds("fp8", a100) == seconds("bfloat16", a100), "which has no such units"


def test_a_step_knows_what_its_numbers_are() -> None:
    """Rows are sent in the type of their hooks, and experts multiply operands of the type that the config names."""

    def expert_s(config: Config) -> float:
        return sum(Step(config, find_cluster("h100x8")).compute()["expert"].of(each, 1) for each in ("F", "B", "W"))

    wide = {"hidden_size": 4096}
    bfloat16, fp8 = (config_of(wide, intermediate_size=8192, expert_matmuls=each) for each in ("compute_dtype", "fp8"))
    long = {"data": dataclasses.replace(bfloat16.data, seq_len=8192)}
    assert expert_s(dataclasses.replace(fp8, **long)) < 0.75 * expert_s(dataclasses.replace(bfloat16, **long))
    sizes = [exchange_bytes(config_of(hooks=each), 1024, EXPERT, "gpu") for each in ("none", "bf16", "fp8")]
    assert sizes == [sizes[0], sizes[0], sizes[0] / 2]


def times(name: str, settings: dict[str, int], amounts: list[float], seconds: list[float]) -> Curve:
    return curve(name, settings, "flops", amounts, [(each, each, each) for each in seconds])


def test_the_most_similar_measured_product_gives_the_rate() -> None:
    square = [2.0 * rows * 1024**2 for rows in (128, 4096)]
    skinny = [4.0 * 4096 * 1024 * 8, 4.0 * 8192 * 1024 * 8]
    curves = [
        times("matmul", {"width": 1024}, square, [square[0] / 1e12, square[1] / 8e12]),
        times("matmul.skinny", {"width": 1024, "columns": 8}, skinny, [each / 2e11 for each in skinny]),
        times("attention", {"head_dim": 64, "heads": 8}, [4.0 * n**2 * 8 * 64 for n in (512, 2048)], [1e-3, 4e-3]),
    ]
    assert measured_rate(curves, 100, 900, 1100) == pytest.approx(1e12)
    assert measured_rate(curves, 10000, 900, 1100) == pytest.approx(8e12)
    assert measured_rate(curves, 4096, 1024, 10) == measured_rate(curves, 4096, 10, 1024) == pytest.approx(2e11)
    assert measured_rate([], 1, 1, 1) is None
    assert measured_attention(curves, 2048, 80) == pytest.approx(4 * 2048**2 * 8 * 64 / 4e-3)
    assert measured_attention(curves[:2], 2048, 64) is None
    device = dataclasses.replace(H100, curves=tuple(curves))
    assert product_seconds(device, Product(4096, 1024, 1024)) == pytest.approx(square[1] / 8e12)
    cluster = dataclasses.replace(find_cluster("h100x8"), device=device)
    config = dataclasses.replace(config_of(), train=TrainConfig(batch_size=8, attention_kernel="xla"))
    step = Step(config, cluster)
    flops = work_of(config, step.tokens, "gpu")["attend"].rest
    rate = measured_attention(curves, config.data.seq_len, config.model.qk_width)
    assert rate is not None
    assert [step.squares_s(each) for each in ("F", "B")] == pytest.approx([flops / rate, 2 * flops / rate])


def test_the_slowest_of_many_devices_is_waited_for() -> None:
    alone, many = H100.slowest_of(1, 0.01), H100.slowest_of(1000, 0.01)
    assert alone == H100
    assert H100.matrix_efficiency / many.matrix_efficiency == pytest.approx(1 + 0.01 * math.sqrt(2 * math.log(1000)))


@pytest.mark.parametrize(
    ("settings", "platform", "times"),
    [
        ([], "gpu", 1),
        ([], "cpu", 4),  # whose collectives send no ragged rows
        (["schedule.expert_chunks=2"], "gpu", 4),
        (["exchange.algorithm=hier_2d"], "tpu", 4),
        (["model.moe.hooks=bf16"], "gpu", 4),
        (["model.moe.capacity_factor=3"], "cpu", 8 / 3),  # no more than its tokens
        (["schedule.policy=expert_pipeline"], "cpu", 1),  # which cuts the slots
    ],
)
def test_a_microbatch_is_padded_in_time_as_in_memory(settings: list[str], platform: str, times: float) -> None:
    """Each one may fill all slots of an expert, unless only rows that exist are sent."""
    config = load_config(
        None,
        [
            *("model.moe.num_experts=16", "model.moe.top_k=2", "model.moe.capacity_factor=1", "model.hidden_size=64"),
            *("mesh.data=1", "mesh.expert=4", "train.batch_size=64", "data.seq_len=64", "train.compute_dtype=bfloat16"),
            *("schedule.policy=unified", "schedule.microbatches=4", *settings),
        ],
    )
    sizes = sizes_of(config, platform, config.mesh.sizes)
    rows = expert_rows(config, sizes.tokens, platform)
    assert rows == pytest.approx(times * 2 * sizes.tokens * config.model.moe.capacity_factor)
    assert sizes.rows.sent == pytest.approx(rows)
    assert exchange_bytes(config, sizes.tokens, 4, platform) == pytest.approx(rows * 64 * 2)


@pytest.mark.parametrize(
    ("kernel", "length", "window"), [("tiled", 4096, 700), ("tiled", 2048, 128), ("splash", 4096, 1025)]
)
def test_tiles_that_a_window_hides_take_no_time(kernel: str, length: int, window: int) -> None:
    """Counted as training counts them, for the blocks that have the window; a fourth sees all earlier tokens."""
    windows = [f"model.attention.sliding_window={window}", "model.attention.full_every=4", "model.num_layers=4"]
    length_of = [f"data.seq_len={length}", f"train.attention_kernel={kernel}", "train.compute_dtype=bfloat16"]
    config = load_config(None, [*windows, *length_of])
    tile = {"tiled": ATTENTION_TILE, "splash": splash_block(length)}[kernel]
    pairs = [len(of_sequence(length, each, tile)[1]) for each in (window, window, window, None)]
    assert computed_keys(config, {"tiled": "gpu", "splash": "tpu"}[kernel]) == sum(pairs) / 4 * tile**2 / length


@pytest.mark.parametrize("window", [1, 65, 130, 600, None])
def test_a_ring_leaves_out_the_ranks_that_a_window_does_not_reach(window: int | None) -> None:
    settings = [
        "mesh.data=1",
        "mesh.context=4",
        "data.seq_len=1024",
        f"model.attention.sliding_window={window or 'null'}",
    ]
    ring, gathered = (
        load_config(None, [*settings, f"exchange.context_form={form}"]) for form in ("ring", "all_gather")
    )
    assert context_hops(ring) == len(ring_of(4, 256, window, 64).hops) - 1
    assert context_hops(gathered) == 3


def test_attention_of_a_preset_is_that_of_its_gpus() -> None:
    """cuDNN's needs NVIDIA's GPUs since Ampere, and Hopper for the heads of DeepSeek's latents."""
    long = ["model.hidden_size=512", "model.num_attention_heads=8", "data.seq_len=4096", "mesh.data=1"]
    long += ["train.compute_dtype=bfloat16", "train.batch_size=8"]
    wide = ["model.latent.kv_lora_rank=64", "model.latent.q_lora_rank=96", "model.num_key_value_heads=null"]
    models = {"narrow": load_config(None, long), "wide": load_config(None, [*long, *wide])}
    found = {
        name: [
            model
            for model, config in models.items()
            if ConfigMemory(find_cluster(name), 1.0).of(config) == step_memory(config, "gpu", None, HOPPER)
            and computed_keys(config, "gpu", find_cluster(name).device.capability) == 4097 / 2
        ]
        for name in ("v100-8", "a100-8", "h100-8", "b200-8", "mi300x-8")
    }
    both = ["narrow", "wide"]
    assert found == {"v100-8": [], "a100-8": ["narrow"], "h100-8": both, "b200-8": both, "mi300x-8": []}
    slow, fast = (
        squares_seconds(models["narrow"], dataclasses.replace(H100, capability=capability), 4096, "F")
        for capability in (None, HOPPER)
    )
    assert slow > fast


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        (["train.attention_kernel=tiled"], 2.5),
        (["mesh.context=2", "mesh.data=1"], 2.5),
        (["mesh.context=2", "mesh.data=1", "exchange.context_form=all_gather"], 2.5),
        (["train.attention_kernel=xla"], 2.0),
    ],
)
def test_the_backward_pass_of_tiles_computes_logits_again(settings: list[str], times: float) -> None:
    config = load_config(None, ["data.seq_len=4096", "train.batch_size=8", "mesh.data=1", *settings])
    device = dataclasses.replace(H100, memory_bytes_per_s=1e30)  # of products alone
    forward, backward = (squares_seconds(config, device, 4096, direction) for direction in ("F", "B"))
    assert backward == pytest.approx(times * forward)
