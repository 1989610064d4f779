"""Runs that begin with a Hugging Face model, with another run, or with experts that are copies of a dense MLP."""

import dataclasses
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from moe_jax import generate
from moe_jax.config import Config, Mesh, MoE, Train
from moe_jax.config_files import load_config
from moe_jax.convert import __main__ as convert
from moe_jax.errors import ConfigError, DataError
from moe_jax.parallel.mesh import make_mesh
from moe_jax.train.init_from import source_params
from moe_jax.train.prepare import prepare_text
from moe_jax.train.setup import compile_programs, first_state, open_run, write_start
from tests.convert.golden import GOLDEN, expected, model_of, read, shapes_on
from tests.models.test_decode import logits_of

NAME = "qwen3_moe"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "<|endoftext|>"]


def params_of(config: Config):
    devices = int(np.prod(list(config.mesh.sizes.values())))
    return source_params(config, shapes_on(make_mesh(config.mesh, jax.devices()[:devices]), config))


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("imported") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert", "import", str(GOLDEN / NAME), "--out", str(run), "mesh.expert=8"])
        convert.main()
    return run


def test_a_run_begins_with_an_imported_model(imported, tmp_path):
    """On another mesh; nothing is chosen at random."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 60)
    settings = "train.batch_size=8 data.seq_len=16 mesh.expert=2 mesh.tensor=2"
    run = open_run(load_config(imported, [*settings.split(), f"log.dir={tmp_path}", f"data.path={tmp_path}/text.txt"]))
    state = first_state(run, compile_programs(run))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state["params"]), read(GOLDEN / NAME))
    assert (int(state["step"]), run.first_step) == (0, 0)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, run.trainer.state_shapes)


def test_an_imported_model_is_exported_as_it_was(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["convert", "export", str(imported), "--out", str(tmp_path / "hf")])
    convert.main()
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "hf"), read(GOLDEN / NAME))


@pytest.fixture
def with_tokenizer(imported, tmp_path) -> Path:
    """The imported run and a folder of tokens, both with the tokenizer of the model; `text.txt` beside them."""
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    saved = run / "config.yaml"
    saved.write_text(saved.read_text().replace(str(imported), str(run)))
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="dog"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(run / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 60)
    prepare_text(tmp_path / "text.txt", tmp_path / "tokens", tokenizer=run)
    return run


def test_a_text_is_not_read_as_bytes_by_a_model_with_a_tokenizer(with_tokenizer):
    folder = with_tokenizer.parent
    settings = ["data.seq_len=4", "train.batch_size=8", "log.sample_tokens=0", f"log.dir={folder}/new"]
    text = f"{folder}/text.txt"
    with pytest.raises(ConfigError) as refusal:
        open_run(load_config(with_tokenizer, [*settings, f"data.path={text}"]))
    assert str(refusal.value) == (
        f"data.path={text} is read as bytes, and train.init_from={with_tokenizer} has a tokenizer.json: "
        f"prepare a folder by scripts/prepare_text.py {text} FOLDER --tokenizer {with_tokenizer}"
    )
    run = open_run(load_config(with_tokenizer, [*settings, f"data.path={folder}/tokens"]))
    write_start(run, "0")
    write_start(run, "0")  # which finds what it wrote
    tokenizer = (with_tokenizer / "tokenizer.json").read_bytes()
    assert (folder / "new" / "tokenizer.json").read_bytes() == tokenizer, "for exports"


def test_an_imported_model_is_sampled_with_its_tokenizer(with_tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", f"generate --run {with_tokenizer} --prompt quick --tokens 3".split())
    generate.main()
    continued = capsys.readouterr().out.removeprefix("quick").split()
    assert set(continued) <= set(WORDS), "words, not bytes"
    (with_tokenizer / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer.json, and its model was not trained here: put the model's"):
        generate.main()


def test_an_upcycled_model_begins_as_the_dense_one():
    """All its experts are alike, and the weights of those that a token chose sum to 1."""
    dense = model_of("llama")
    moe = MoE(num_experts=4, top_k=2, hidden_dim=dense.hidden_dim, capacity_factor=None)
    model = dataclasses.replace(dense, moe=moe)
    settings = Train(init_from=str(GOLDEN / "llama"), upcycle=True)
    params = params_of(Config(model=model, mesh=Mesh(data=1, expert=2), train=settings))
    token_BN, logit_BNV = expected("llama")
    np.testing.assert_allclose(logits_of(jax.device_get(params), token_BN, model), logit_BNV, rtol=0, atol=2e-5)
    router = params["segments"][0][0]["moe"]["router"]
    assert 0.005 < router.std() < 0.02, "random"
