"""YAML files and overrides: what stands there is what the config has, and a slip is answered with the right name."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_jax.config import (
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RopeScalingConfig,
    TrainConfig,
)
from moe_jax.config.renamed import RENAMED
from moe_jax.config.sections import DataSource
from moe_jax.config.validate import setting
from moe_jax.config.yaml_io import config_from, load_config, load_draft, setting_names, to_yaml
from moe_jax.errors import ConfigError

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml"))
NAMES = list(setting_names(Config))
LEAVES = [name for name in NAMES if not any(other.startswith(f"{name}.") for other in NAMES)]

CONFIGS = {
    "defaults": Config(),
    "dense": Config(
        model=ModelConfig(moe=MoEConfig(num_experts=0), num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    ),
    "experts": Config(
        model=ModelConfig(
            hidden_size=48, num_layers=5, moe=MoEConfig(first_k_dense_replace=1, moe_layer_freq=2, capacity_factor=None)
        ),
        mesh=MeshConfig(data=2, expert=4, cpu_devices=8),
        optimizer=OptimizerConfig(learning_rate=3e-4, eps=1e-20, clip_norm=None, schedule="constant"),
    ),
    "scheduled": Config(model=ModelConfig(moe=MoEConfig(capacity_schedule=((10.0, 1.5), (20.0, 1.0))))),
    "two tokens": Config(
        model=ModelConfig(num_nextn_predict_layers=1),
        train=TrainConfig(mtp_loss_scaling_factor=0.3, mtp_loss_schedule=((1000.0, 0.1),)),
    ),
    "mixture": Config(
        data=DataConfig(
            path=None,
            sources=(
                DataSource(path="a.txt", weight=1.0, name="web"),
                DataSource(path="b", weight=0.0, weight_schedule=((10.0, 0.5), (20.0, 2.0))),
            ),
        )
    ),
    "long positions": Config(
        model=ModelConfig(
            head_dim=4,
            rope_scaling=RopeScalingConfig(rope_type="longrope", short_factor=(1.0, 1.5), long_factor=(1.0, 9.25)),
        )
    ),
    "long": Config(train=TrainConfig(steps=2**31 - 1, seed=2**31 - 1), data=DataConfig(validation_fraction=1 / 3)),
}


def as_values(config: Config) -> dict[str, object]:
    return {name: setting(config, name) for name in LEAVES}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_a_config_survives_its_file(config: Config, tmp_path: Path) -> None:
    assert config_from(yaml.safe_load(to_yaml(config))) == config, "other programs read the file as well"
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
    assert load_config(tmp_path) == config, "a run's folder stands for its config"
    assert load_config(None, [f"{name}={_plain(value)}" for name, value in as_values(config).items()]) == config


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        value = tuple(dataclasses.asdict(each) if isinstance(each, DataSource) else each for each in value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


@pytest.mark.parametrize(
    "text",
    [
        *("3e-4", "1_000", "010", "1:30", ".5", "2026-01-01", "2026-13-45", "on", "no", "true", "null", "~", "=", "<<"),
        *(
            "",
            "\n",
            " ",
            "a: b",
            "#",
            "- x",
            "'",
            '"',
            "é 言葉 🙂",
            "{a}",
            "\t",
            "\x7f",
            "a\n\nb ",
            "&a",
            "*a",
            "!x",
            "%",
        ),
    ],
)
def test_a_text_that_looks_like_something_else_survives_its_file(text: str, tmp_path: Path) -> None:
    config = Config(log=LogConfig(sample_prompt=text))
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config


def candidates(name: str) -> Iterator[Any]:
    """Values that a setting might be changed to."""
    section: Any = Config
    *parts, key = name.split(".")
    for part in parts:
        section = typing.get_type_hints(section)[part]
    hint = typing.get_type_hints(section)[key]
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(kinds[0], str | int):  # the values of a Literal
        yield from kinds
    value = setting(Config(), name)
    others: dict[type, list[Any]] = {
        bool: [not value],
        str: ["other", "package.module:name", "blocks"],
        float: [0.75, 12.0],
    }
    yield from others.get(kinds[0], [])
    if int in kinds:
        yield from [2, 1, 8, 32]


FIXED = {
    *("schedule.bucket_cap_mb", "schedule.microbatches", "schedule.expert_chunks", "schedule.virtual_stages"),
    *("schedule.pipeline", "schedule.head_blocks", "schedule.param_gather"),
    "schedule.offload_activations",
    *("mesh.experts_over_context", "mesh.experts_over_tensor"),
    *("log.trace_step", "data.sources"),
    *("tune.over", "migration.enabled", "migration.rank_speeds", "exchange.hot_experts", "train.skip_spikes"),
    "model.moe.capacity_schedule",
    *(
        f"model.latent.{name}"
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps")
    ),
    *("model.attention.full_every", "model.qk_norm_after_rope", "model.qk_norm_over", "model.attention.out_bias"),
    *(f"optimizer.{name}" for name in ("decay_fraction", "groups", "momentum", "zero_axes")),
    *("optimizer.newton_schulz_steps", "optimizer.newton_schulz_dtype"),
    *(
        f"model.moe.{name}"
        for name in (
            "n_group",
            "topk_group",
            "router_rank",
            "slots_per_expert",
            "shared_gate",
            "norm_top1_prob",
            "router_jitter_noise",
            "apply_probs_on_input",
        )
    ),
    *(f"model.delta_net.{name}" for name in ("num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")),
    "model.delta_net.full_attention_interval",
    *("model.attention.attn_scale", "model.attention.floor_scale"),
    *(f"model.mamba.{name}" for name in ("head_dim", "n_groups", "d_state", "d_conv")),
    *(f"model.mamba.{name}" for name in ("attn_layer_period", "attn_layer_offsets", "mixer_only_offsets")),
    *(f"model.rope_scaling.{name}" for name in ("factor", "attention_factor", "mscale_all_dim")),
    *(
        f"model.rope_scaling.{name}"
        for name in ("original_max_position_embeddings", "slow_turns", "fast_turns", "truncate")
    ),
    *("model.rope_scaling.short_factor", "model.rope_scaling.long_factor"),
    *("train.upcycle", "train.mtp_loss_scaling_factor", "train.mtp_loss_schedule"),
}


def test_every_setting_can_be_overridden_by_name_alone() -> None:
    """And the override changes that setting and no other. Those of one value are known."""
    before = as_values(Config())
    unchangeable = set()
    for name in LEAVES:
        for value in candidates(name):
            try:
                after = as_values(load_config(None, [f"{name}={_plain(value)}"]))
            except ConfigError:
                continue
            if value != before[name]:
                assert after == before | {name: value}
                assert type(after[name]) is type(value)
                break
        else:
            unchangeable.add(name)
    assert unchangeable == FIXED


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e4", 1e4),
        ("1E+2", 100.0),
        ("1e-3", 1e-3),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000.0),
        ("1_000.5", 1000.5),
        ("+2", 2.0),
        ("7", 7.0),
    ],
)
def test_a_number_is_a_number(text: str, value: float) -> None:
    read = load_config(None, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate
    assert (read, type(read)) == (value, float)


@pytest.mark.parametrize(
    "text", ["1e", "e4", "1e4x", "3-4", "010", "0x10", "1:30", "1,5", "nan", "on", "2026-01-01", "."]
)
def test_what_only_resembles_a_number_is_text(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [f"optimizer.learning_rate={text}"])
    assert str(refusal.value) == f"optimizer.learning_rate={text!r} must be a number, not text"
    assert load_config(None, [f"log.dir={text}"]).log.dir == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=1e4", 10_000),
        ("train.steps=1_000", 1000),
        ("train.steps=20.0", 20),
        ("optimizer.clip_norm=2", 2.0),
        ("optimizer.clip_norm=null", None),
        ("model.head_dim=~", None),
        ("mesh.cpu_devices=NULL", None),
        ("model.qk_norm=True", True),
        ("log.sample_prompt=", ""),
        ('log.sample_prompt="\\n"', "\n"),
        ("log.sample_prompt='7'", "7"),
        ("log.dir=a=b", "a=b"),
    ],
)
def test_an_override_is_read_as_what_the_setting_wants(override: str, value: object) -> None:
    read = setting(load_config(None, [override]), override.partition("=")[0])
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=1.5", "train.steps=1.5 must be a whole number"),
        ("train.steps=.nan", "train.steps=nan must be a whole number"),
        ("train.steps=-.inf", "train.steps=-inf must be a whole number"),
        ("train.loss_chunk=.inf", "train.loss_chunk=inf must be a whole number or null"),
        ("train.steps=true", "train.steps=true must be a whole number, not true or false"),
        ("train.steps=[true, 1]", "train.steps=[true, 1] must be a whole number, not a list"),
        ("train.steps=null", "train.steps=null must be a whole number, not null"),
        ("train.steps=", "train.steps='' must be a whole number, not text"),
        ("train.steps=[1]", "train.steps=[1] must be a whole number, not a list"),
        ("train.steps={a: 1}", "train.steps={'a': 1} must be a whole number, not a section"),
        ("optimizer.clip_norm=x", "optimizer.clip_norm='x' must be a number or null, not text"),
        ("model.qk_norm=yes", "model.qk_norm='yes' must be true or false, not text"),
        ("model.qk_norm=1", "model.qk_norm=1 must be true or false, not a number"),
        ("log.dir=7", "log.dir=7 must be text, not a number: put it in quotes"),
        ("log.dir=true", "log.dir=true must be text, not true or false: put it in quotes"),
        (
            "model.activation=swiglo",
            "model.activation=swiglo must be swiglu or gelu or clipped_swiglu or squared_relu: did you mean swiglu?",
        ),
        ("model.activation=3", "model.activation=3 must be swiglu or gelu or clipped_swiglu or squared_relu"),
        (
            "model=3",
            f"model=3 must be a section with keys {', '.join(f.name for f in dataclasses.fields(ModelConfig))}",
        ),
        ("train", "override 'train' is not of the form section.key=value, e.g. train.steps=100"),
        ("mesh.expert=auot", "mesh.expert='auot' must be a whole number, not text: did you mean auto?"),
        (
            "schedule.policy=atuo",
            "schedule.policy=atuo must be vanilla or expert_pipeline or unified or package.module:name: "
            "did you mean auto?",
        ),
        ("train=null", "override 'train=null': train is a section, and null would leave it as it is"),
        (
            "model.moe=null",
            "override 'model.moe=null': model.moe is a section, and null would leave it as it is: "
            "set model.moe.num_experts=0 for a model without experts",
        ),
        ("train={steps: 3}", "override 'train={steps: 3}': train is a section: write train.steps=3"),
        (
            "model={hidden_size: 64, moe: {top_k: 1, gate: sigmoid}}",
            "override 'model={hidden_size: 64, moe: {top_k: 1, gate: sigmoid}}': model is a section: write "
            "model.hidden_size=64 model.moe.top_k=1 model.moe.gate=sigmoid",
        ),
        ("mesh={}", "override 'mesh={}': mesh is a section: write mesh.key=value"),
        ("=3", "override '=3' is not of the form section.key=value, e.g. train.steps=100"),
        (
            "train.steps={",
            "override 'train.steps={': expected the node content, but found '<stream end>' at line 1, column 2",
        ),
        ("train.steps=" + "9" * 5000, f"override 'train.steps={'9' * 5000}': not YAML"),
    ],
)
def test_a_wrong_value_is_reported_with_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [override])
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("lr", "optimizer.learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("optimizer.wd", "optimizer.weight_decay"),
        ("optimizer.warmup", "optimizer.warmup_steps"),
        ("n_layers", "model.num_layers"),
        ("model.num_layer", "model.num_layers"),
        ("model.n_heads", "model.num_attention_heads"),
        ("model.hidden", "model.hidden_size"),
        ("hidden_size", "model.hidden_size"),
        ("topk", "model.moe.top_k"),
        ("model.top_k", "model.moe.top_k"),
        ("model.num_expert", "model.moe.num_experts"),
        ("model.moe.experts", "model.moe.num_experts"),
        ("model.moe.capacity", "model.moe.capacity_factor"),
        ("batchsize", "train.batch_size"),
        ("data.batch_size", "train.batch_size"),
        ("train.max_steps", "train.steps"),
        ("steps", "train.steps"),
        ("train.dtype", "train.compute_dtype"),
        ("train.seq_len", "data.seq_len"),
        ("data.seqlen", "data.seq_len"),
        ("mesh.experts", "mesh.expert"),
        ("train.microbatches", "schedule.microbatches"),
        ("checkpoint.save_every", "checkpoint.every"),
        ("log.path", "data.path"),
        ("moe.top_k", "model.moe"),
        ("optimiser.eps", "optimizer"),
        ("modle.hidden_size", "model"),
    ],
)
def test_a_typical_slip_is_answered_with_the_right_name(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown setting .*: did you mean {re.escape(meant)}\?$"):
        load_config(None, [f"{typo}=1"])


@pytest.mark.parametrize(("name", "has"), [("model.foo", "model has "), ("foo", "a config has ")])
def test_what_resembles_no_setting_is_answered_with_all_there_are(name: str, has: str) -> None:
    siblings = sorted(field.name for field in dataclasses.fields(ModelConfig if name == "model.foo" else Config))
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [f"{name}=1"])
    assert str(refusal.value) == f"unknown setting {name}: {has}{', '.join(siblings)}"


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("train: {steps: 5, seed: 3}\nmodel:\n")
    config = load_config(file, ["train.steps=6", "model.moe.top_k=1", "train.steps=7", "log.dir=there"])
    assert config == Config(
        model=ModelConfig(moe=MoEConfig(top_k=1)),
        train=TrainConfig(steps=7, seed=3),
        log=LogConfig(dir="there"),
    )


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("train: 5\n")
    with pytest.raises(ConfigError, match=r"^override 'train.steps=1': train is a value, not a section$"):
        load_config(file, ["train.steps=1"])


def test_an_empty_file_is_the_default_config(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "x.yaml") == load_config() == Config()


@pytest.mark.parametrize("path", EXPERIMENTS)
def test_an_experiment_loads_and_its_first_lines_give_its_command(path: str) -> None:
    load_config(ROOT / path)
    comment = re.match(r"(#.*\n)*", (ROOT / path).read_text())
    assert comment is not None
    commands = re.findall(r"python -m moe_jax\.\w+[^\n]* --config (\S+)", comment[0])
    assert commands, f"{path} begins with no comment that has its command"
    assert set(commands) == {path}, "the command of another file"


def test_there_are_experiments() -> None:
    assert "configs/shakespeare_cpu.yaml" in EXPERIMENTS


def test_settings_that_say_auto_are_open() -> None:
    draft = load_draft(None, ["schedule.policy=auto", "schedule.microbatches=4", "mesh.expert=auto", "train.steps=7"])
    assert draft.open == {"schedule.policy", "mesh.expert"}
    config = draft.choose(schedule={"policy": "unified", "microbatches": 2}, mesh={"expert": 8})
    assert (config.schedule.policy, config.schedule.microbatches, config.mesh.expert) == ("unified", 4, 8)
    assert config.train.steps == 7


def test_open_settings_are_refused_where_nothing_chooses_them() -> None:
    with pytest.raises(
        ConfigError, match=r"^schedule\.remat=auto is open here: give a value, or the config that .* writes"
    ):
        load_config(None, ["schedule.remat=auto"])


@pytest.mark.parametrize("name", ["train.steps", "exchange.reduction", "optimizer.clip_norm"])
def test_what_nothing_chooses_cannot_be_auto(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=auto: nothing chooses it, so give a value \(auto is for exchange"):
        load_draft(None, [f"{name}=auto"])


def test_old_names_are_answered_with_the_new_ones_and_read_in_a_run(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^unknown setting model\.moe\.every: did you mean model\.moe\.moe_layer_freq"
    ):
        load_config(overrides=["model.moe.every=2"])
    with pytest.raises(ConfigError, match=r"must be end or block or bucketed: did you mean bucketed\? It was renamed$"):
        load_config(overrides=["schedule.grad_reduce=chunked"])
    with pytest.raises(
        ConfigError, match=r"^tune\.over=chunk_mb must be .*: did you mean bucket_cap_mb\? It was renamed$"
    ):
        load_config(overrides=["tune.over=[chunk_mb]"])
    names = set(setting_names(Config))
    assert {f"{old.rpartition('.')[0]}.{new}" for old, new in RENAMED.items()} <= names
    assert not RENAMED.keys() & names
    old = {"model": {"d_model": 64, "moe": {"every": 2}}, "schedule": {"grad_reduce": "chunked", "chunk_mb": 2.0}}
    (tmp_path / "config.yaml").write_text(yaml.dump(old))
    config = load_config(tmp_path, ["schedule.policy=unified"])
    assert (config.model.hidden_size, config.model.moe.moe_layer_freq) == (64, 2)
    assert (config.schedule.grad_reduce, config.schedule.bucket_cap_mb) == ("bucketed", 2.0)
