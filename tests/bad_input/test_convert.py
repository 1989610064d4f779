"""Hugging Face folders that are incomplete, damaged or not supported, and runs that are not what they name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.bad_input.cases import Refusal, cases
from tests.convert.golden import GOLDEN

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
CONFIG = "hf/config.json"
IN = "convert import hf --out made"
WRITTEN = (
    "it must be mixtral, llama, qwen3, qwen2, mistral, qwen3_moe, olmoe, qwen2_moe, deepseek_v3, deepseek_v2, gpt_oss, "
    "dots1, glm4_moe, minimax_m2, ernie4_5_moe, granitemoe, glm4_moe_lite, hunyuan_v1_moe, qwen3_next, "
    "qwen3_5_moe_text, phimoe, llama4_text, granitemoehybrid, nemotron_h"
)
READ = f"{WRITTEN}, kimi_k2, deepseek_v32, glm_moe_dsa"
Damage = Callable[[Path], object]


def change(**settings: object) -> Damage:
    """Damage to config.json; None removes a setting."""

    def damage(hf: Path) -> None:
        found = json.loads((hf / "config.json").read_text()) | settings
        kept = {name: value for name, value in found.items() if value is not None}
        (hf / "config.json").write_text(json.dumps(kept))

    return damage


def index_to(name: str) -> Damage:
    def damage(hf: Path) -> None:
        text = (hf / INDEX).read_text()
        (hf / INDEX).write_text(text.replace(FIRST, name))

    return damage


def cut(hf: Path) -> None:
    (hf / FIRST).write_bytes((hf / FIRST).read_bytes()[:-1])


def edit(name: str, edits: Callable[[dict[str, Any]], object]) -> Damage:
    """Damage to the tensors of the file that has this one."""

    def damage(hf: Path) -> None:
        for file in hf.glob("model*.safetensors"):
            if name in (found := load_file(file)):
                edits(found)
                save_file(found, file)

    return damage


EXTRA = "model.layers.1.self_attn.q_proj.bias"
MISSING = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


REFUSED = [
    ("no folder", shutil.rmtree, IN, "hf/config.json does not exist: name the folder of a Hugging Face model"),
    (
        "no JSON",
        lambda hf: (hf / "config.json").write_text("{"),
        IN,
        "hf/config.json is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): "
        "fetch it again",
    ),
    (
        "a list",
        lambda hf: (hf / "config.json").write_text("[]"),
        IN,
        "hf/config.json holds no JSON object: fetch it again",
    ),
    ("another family", change(model_type="gpt2"), IN, f"hf/config.json: model_type='gpt2' is not supported: {READ}"),
    (
        "a setting is missing",
        change(hidden_size=None),
        IN,
        "hf/config.json has no hidden_size: use the file that came with the model",
    ),
    ("a wrong type", change(hidden_size="32"), IN, 'hf/config.json: hidden_size="32" must be a whole number'),
    (
        "other activation",
        change(hidden_act="gelu"),
        IN,
        'hf/config.json: hidden_act="gelu" is not supported: it must be "silu"',
    ),
    (
        "other rotation",
        change(rope_parameters={"rope_type": "dynamic"}),
        IN,
        'hf/config.json: rope_parameters: rope_type="dynamic" is not supported: it must be linear, llama3, yarn',
    ),
    (
        "quantised",
        change(quantization_config={"quant_method": "awq", "bits": 4}),
        IN,
        "hf/config.json: quantization_config: quant_method='awq' is not supported: it must be 'fp8' in blocks, or "
        "'mxfp4' of gpt_oss; convert the model to bfloat16 first",
    ),
    (
        "heads that do not divide",
        change(num_key_value_heads=3),
        IN,
        "model.num_key_value_heads=3 does not divide model.num_attention_heads=4: use 1, 2 or 4",
    ),
    (
        "an index that leads away",
        index_to("../secret.safetensors"),
        IN,
        f'train.init_from=hf: hf/{INDEX} names "../secret.safetensors", no .safetensors file of its own folder: '
        "fetch it again",
    ),
    (
        "an absolute index",
        index_to("/etc/passwd"),
        IN,
        f'train.init_from=hf: hf/{INDEX} names "/etc/passwd", no .safetensors file of its own folder: fetch it again',
    ),
    (
        "a file is missing",
        lambda hf: (hf / FIRST).unlink(),
        IN,
        f"train.init_from=hf: hf/{FIRST} is missing, and {INDEX} names it: fetch it, too",
    ),
    (
        "no files",
        lambda hf: (hf / INDEX).unlink(),
        IN,
        f"train.init_from=hf: hf has neither model.safetensors nor {INDEX}: name the folder of a model that has",
    ),
    (
        "a file is cut",
        cut,
        IN,
        f"train.init_from=hf: hf/{FIRST} cannot be read (Error while deserializing header: incomplete metadata, file "
        "not fully covered): fetch it again",
    ),
    (
        "another shape",
        change(vocab_size=65),
        IN,
        f"train.init_from=hf: hf/{FIRST}: model.embed_tokens.weight is [64, 32], and "
        "config.json makes it [65, 32]: use the files that belong together",
    ),
    (
        "more blocks",
        change(num_hidden_layers=3),
        IN,
        "train.init_from=hf: hf has no tensor model.layers.2.input_layernorm.weight: fetch all of its files, or use "
        "another config.json",
    ),
    (
        "a tensor is missing",
        edit(MISSING, lambda tensors: tensors.pop(MISSING)),
        IN,
        f"train.init_from=hf: hf has no tensor {MISSING}: fetch all of its files, or use another config.json",
    ),
    (
        "a tensor that the settings have no place for",
        edit(
            "model.embed_tokens.weight", lambda tensors: tensors.update({EXTRA: tensors["model.embed_tokens.weight"]})
        ),
        IN,
        f"train.init_from=hf: hf/{FIRST}: {EXTRA} has no place in a model of config.json's settings: use the files "
        "that belong together",
    ),
    (
        "another type",
        edit(
            "lm_head.weight", lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].view("i2")})
        ),
        IN,
        f"train.init_from=hf: hf/{FIRST}: lm_head.weight is of type I16, which is not supported: "
        "convert it to BF16 first",
    ),
    (
        "something is there",
        lambda hf: None,
        "convert import hf --out full",
        "--out=full exists and is not an empty folder: name another one, or remove it",
    ),
    (
        "a flag of the other way",
        lambda hf: None,
        f"{IN} --dtype float32",
        "--dtype is for export: see python -m moe_jax.convert --help",
    ),
    (
        "a run of another model",
        lambda hf: None,
        "train --config tiny.yaml train.init_from=hf",
        "train.init_from=hf: model.vocab_size=256, and the model in hf has model.vocab_size=64: use that, or "
        "another model",
    ),
    (
        "begins with nothing",
        lambda hf: None,
        "train --config tiny.yaml train.init_from=full",
        "train.init_from=full: it has no config.json and no config.yaml: name the folder of a model, or of a run",
    ),
]


@pytest.mark.parametrize(("damage", "line", "message"), cases(REFUSED))
def test_a_model_is_refused(damage: Damage, line: str, message: str, folder: Path, assert_refused: Refusal) -> None:
    shutil.copytree(GOLDEN / "mixtral", folder / "hf")
    damage(folder / "hf")
    assert_refused(line, message)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "deepseek_v3",
            {"n_group": 3},
            "model.moe.num_experts=8 is not divisible by model.moe.n_group=3: use 1, 2, 4 or 8 groups",
        ),
        ("deepseek_v3", {"topk_group": 5}, "model.moe.topk_group=5 must be 1..model.moe.n_group=4"),
        (
            "deepseek_v3",
            {"topk_group": 1},
            "model.moe.top_k=3 experts are not in model.moe.topk_group=1 of 2 experts each: use "
            "model.moe.topk_group=2 or more, or model.moe.top_k=2 or less",
        ),
        (
            "deepseek_v3",
            {"n_group": 8, "topk_group": 4},
            "model.moe.n_group=8 leaves one expert in each group, and gate deepseek_v3 scores a group by two: use "
            "model.moe.n_group=4 or less, or model.moe.gate=deepseek_v2",
        ),
        ("deepseek_v2", {"n_group": None}, "hf/config.json has no n_group: use the file that came with the model"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            'hf/config.json: topk_method="noaux_tc" is not supported: it must be "greedy" or "group_limited_greedy"',
        ),
        (
            "deepseek_v32",
            {"layer_types": ["full_attention"] * 3},
            "hf/config.json: layer_types is not supported: all must be indexed_attention",
        ),
        ("glm_moe_dsa", {"index_topk": -1}, "hf/config.json: index_topk=-1 must be 0..2147483647"),
    ],
)
def test_settings_of_deepseek_that_are_not_built_are_refused(
    family: str, settings: dict[str, object], message: str, folder: Path, assert_refused: Refusal
) -> None:
    shutil.copytree(GOLDEN / family, folder / "hf")
    change(**settings)(folder / "hf")
    assert_refused(IN, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "convert export run --out out --family qwen3_moe",
            "no files of qwen3_moe hold this model; nearest are those of qwen3_moe, which have no model.qk_norm=False: "
            "change that, and train it so",
        ),
        ("convert export run --out out --family gpt2", f"--family=gpt2 is not supported: {WRITTEN}"),
        (
            "convert export run --out out --family deepseek_v32",
            "--family=deepseek_v32 is not supported: use deepseek_v3",
        ),
        ("convert export run --out full", "full exists and is not an empty folder: name another one, or remove it"),
        (
            "convert export run --out out train.steps=3",
            "train.steps=3 changes a model's settings, and export writes what there is: "
            "see python -m moe_jax.convert --help",
        ),
        *(
            (
                f"convert export run --out out {flags}",
                "--distributed and --coordinator are for import: one process exports: "
                "see python -m moe_jax.convert --help",
            )
            for flags in ("--distributed=on", "--coordinator 127.0.0.1:8476 --num-processes 2 --process-id 0")
        ),
        (
            "convert export run --out out --num-processes 2",
            "--num-processes=2 also needs --coordinator and --process-id: give all three or none",
        ),
    ],
)
def test_an_export_is_refused(line: str, message: str, run: Path, assert_refused: Refusal) -> None:
    assert_refused(line, message)
