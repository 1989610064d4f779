"""The config's own rules: what it refuses and with which words, what it derives, and that all of it is used."""

import ast
import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import moe_jax
from moe_jax import config as config_module
from moe_jax.config import Config, LogConfig, ModelConfig, MoEConfig
from moe_jax.config import validate as config_checks
from moe_jax.config.validate import check_batch_split
from moe_jax.config.validate.ranges import RANGES
from moe_jax.config.yaml_io import load_config, setting_names
from moe_jax.errors import ConfigError
from tests.refusals import REFUSED

SOURCES = Path(moe_jax.__file__).parent
CHECKS = sorted(Path(config_checks.__file__).parent.glob("*.py"))
SECTIONS = [kind for kind in vars(config_module).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
NAMES = list(setting_names(Config))
LEAVES = [name for name in NAMES if not any(other.startswith(f"{name}.") for other in NAMES)]


def made(changes: str) -> Config:
    """The default config with these `section.key=value` words, which also fits a mesh of four devices."""
    config = load_config(overrides=changes.split())
    check_batch_split(config, batch_shards=4)
    return config


@pytest.mark.parametrize(("changes", "message"), REFUSED.items(), ids=list(REFUSED))
def test_a_refusal_gives_name_value_and_cure(changes: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        made(changes)
    assert str(refusal.value) == message
    names = [change.partition("=")[0] for change in changes.split()]
    assert any(name in message for name in names) or "head width" in message
    assert re.search(r"\b(must|use|set|name|needs)\b", message), "what can the user do?"


def test_every_refusal_of_the_config_is_in_the_table() -> None:
    """A new check without an entry above fails here."""
    raised = set()
    refused = [partial(made, changes) for changes in REFUSED]
    for make in [*refused, partial(Config, log=LogConfig(dir="~/run"))]:  # the last one can only be made in Python
        with pytest.raises(ConfigError) as refusal:
            make()
        raised.add((str(refusal.traceback[-1].path), refusal.traceback[-1].lineno + 1))
    for source in (Path(config_module.__file__), *CHECKS):
        raises = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Raise)]
        lines = {line for file, line in raised if file == str(source)}
        missed = [node.lineno for node in raises if not lines & {*range(node.lineno, (node.end_lineno or 0) + 1)}]
        assert not missed, f"{source} raises in lines {missed} what the table does not have"


def numbers() -> Iterator[tuple[str, type]]:
    for name in LEAVES:
        section: Any = Config()
        for part in name.split(".")[:-1]:
            section = getattr(section, part)
        hint = typing.get_type_hints(type(section))[name.rpartition(".")[2]]
        if typing.get_origin(hint) is not tuple:
            for kind in {int, float} & ({hint} | set(typing.get_args(hint))):
                yield name, kind


@pytest.mark.parametrize("name", [name for name, kind in numbers() if kind is float])
@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
def test_no_float_may_be_infinite_or_no_number(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}=-?(nan|inf) must "):
        made(f"{name}={text}")


@pytest.mark.parametrize("name", [name for name, kind in numbers() if kind is int])
def test_no_whole_number_leaves_its_range(name: str) -> None:
    for value in (-3, 2**31):
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}={value} must be at "):
            made(f"{name}={value}")


@pytest.mark.parametrize("name", [name for name, kind in numbers() if kind is float])
@pytest.mark.parametrize("value", [-0.5, 1e31, 10**400], ids=["-0.5", "1e31", "10**400"])
def test_no_fraction_leaves_its_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}=.* must (be|lie) "):
        made(f"{name}={value}")


def test_every_number_has_a_smallest_and_a_largest_value() -> None:
    in_lists = {
        *("model.moe.capacity_schedule", "train.mtp_loss_schedule", "log.trace_step", "migration.rank_speeds"),
        *("model.rope_scaling.short_factor", "model.rope_scaling.long_factor", "model.mamba.attn_layer_offsets"),
        "model.mamba.mixer_only_offsets",
    }
    assert RANGES.keys() == {name for name, _ in numbers()} | in_lists
    assert all(allowed.least < allowed.most < math.inf for allowed in RANGES.values())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_section_is_frozen_and_keyword_only(section: type) -> None:
    fields = dataclasses.fields(section)
    assert fields
    assert all(field.kw_only for field in fields)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section(), fields[0].name, None)
    assert section() == section()
    assert hash(section()) == hash(section()), "jit's static arguments are hashed"


@pytest.mark.parametrize(
    ("num_layers", "moe", "expected"),
    [
        (3, MoEConfig(num_experts=0), "dense dense dense"),
        (3, MoEConfig(), "moe moe moe"),
        (4, MoEConfig(moe_layer_freq=2), "dense moe dense moe"),
        (5, MoEConfig(moe_layer_freq=2), "dense moe dense moe dense"),
        (4, MoEConfig(first_k_dense_replace=1), "dense moe moe moe"),
        (6, MoEConfig(first_k_dense_replace=1, moe_layer_freq=2), "dense dense moe dense moe dense"),
        (3, MoEConfig(first_k_dense_replace=2), "dense dense moe"),
    ],
)
def test_experts_stand_in_every_nth_block_above_the_first_dense_ones(
    num_layers: int, moe: MoEConfig, expected: str
) -> None:
    assert " ".join(ModelConfig(num_layers=num_layers, moe=moe).block_kinds) == expected


def test_every_accepted_model_with_experts_has_a_block_with_experts() -> None:
    accepted = 0
    for layers in range(1, 6):
        for first in range(6):
            for every in range(1, 6):
                model = ModelConfig(num_layers=layers, moe=MoEConfig(first_k_dense_replace=first, moe_layer_freq=every))
                try:
                    Config(model=model)
                except ConfigError:
                    assert "moe" not in model.block_kinds
                else:
                    assert "moe" in model.block_kinds
                    accepted += 1
    assert accepted > 20


def test_tensor_ranks_divide_the_width_of_mlps_only_where_there_are_some() -> None:
    """Half of these blocks end after Mamba-2, the others have experts, or one of them an MLP."""
    places = ["attn_layer_period=2", "attn_layer_offsets=[1]", "mixer_only_offsets=[0]"]
    given = ["model.mamba.num_heads=4", *(f"model.mamba.{each}" for each in places)]
    given += [
        "model.intermediate_size=25",
        "mesh.cpu_devices=4",
        "mesh.expert=2",
        "mesh.tensor=2",
        "model.num_layers=4",
    ]
    assert load_config(None, [*given, "model.moe.moe_layer_freq=1"]).model.num_mlp_blocks == 0
    with pytest.raises(ConfigError, match=r"model\.intermediate_size=25 is not divisible by mesh.tensor=2"):
        load_config(None, [*given, "model.moe.moe_layer_freq=4"])


def test_null_heads_follow_the_model() -> None:
    assert (
        ModelConfig(num_attention_heads=4).kv_heads,
        ModelConfig(num_attention_heads=4, num_key_value_heads=2).kv_heads,
    ) == (
        4,
        2,
    )
    assert (ModelConfig(hidden_size=64, num_attention_heads=4).head_width, ModelConfig(head_dim=10).head_width) == (
        16,
        10,
    )


def settings_read() -> set[str]:
    """`section.key` of every attribute that the package reads from a section, the config's own checks left out.

    A section is known by its name, by names that it was given (`settings, model = config.schedule, config.model`), or
    is `self`.
    """
    read = set()
    for file in set(SOURCES.rglob("*.py")) - set(CHECKS):
        tree = ast.parse(file.read_text())
        parts: list[tuple[ast.AST, str]] = [(tree, "")]
        if file.parent == SOURCES / "config" / "sections":
            parts = [
                (node, re.sub("(?<=[a-z])(?=[A-Z][a-z])", "_", node.name.removesuffix("Config")).lower())
                for node in tree.body
                if isinstance(node, ast.ClassDef)
            ]
        for part, itself in parts:
            nodes = list(ast.walk(part))
            alias = {("self", itself)} | {
                (target.id, value.attr)
                for node in nodes
                if isinstance(node, ast.Assign)
                for target, value in zip(parts_of(node.targets[0]), parts_of(node.value), strict=False)
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute)
            }
            for node in nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    owner = node.value
                    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                    read |= {f"{section}.{node.attr}" for own, section in {*alias, (name, name)} if own == name}
    return read


def parts_of(node: ast.expr) -> list[ast.expr]:
    """The elements of a tuple; anything else is its only part."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


def test_every_setting_is_read() -> None:
    """A setting that nothing reads is a promise that nothing keeps."""
    read = settings_read()
    assert [name for name in LEAVES if ".".join(name.split(".")[-2:]) not in read] == []
    assert not {"model.top_k", "train.microbatches", "optimizer.steps", "log.keep"} & read, "this search finds anything"
