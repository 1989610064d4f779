"""Runs that begin with a Hugging Face model, with another run, or with experts that are copies of a dense MLP."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from moe_jax.cli import convert, generate
from moe_jax.config import Config, DataConfig, MeshConfig, MoEConfig, TrainConfig
from moe_jax.config.yaml_io import load_config
from moe_jax.data.prepare import prepare_text
from moe_jax.errors import ConfigError, DataError
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.init_from import source_params
from moe_jax.run.model_tokenizer import check_tokens
from moe_jax.run.setup import compile_programs, first_state, open_run, write_start
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
    """The imported run and a folder of tokens, both with the tokenizer of the model; `text.txt` next to them."""
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


def test_tokens_of_another_tokenizer_are_refused(with_tokenizer, capsys):
    """Though there are no more of them; how the same one is written down does not matter."""
    folder = with_tokenizer.parent
    settings = ["data.seq_len=4", "train.batch_size=8", "log.sample_tokens=0", f"log.dir={folder}/new"]
    made = Tokenizer.from_file(str(with_tokenizer / "tokenizer.json"))
    text = json.dumps(json.loads(made.to_str()), indent=3, sort_keys=True)
    other = text.replace('"quick": 1', '"quick": 2').replace('"brown": 2', '"brown": 1')
    assert other != text
    for name, content in (("rewritten", text), ("other", other)):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(content)
        prepare_text(folder / "text.txt", folder / f"{name}_tokens", tokenizer=folder / name)
    prepare_text(folder / "text.txt", folder / "bytes")
    capsys.readouterr()
    open_run(load_config(with_tokenizer, [*settings, f"data.path={folder}/rewritten_tokens"]))
    cure = f"prepare a folder by scripts/prepare_text.py TEXT FOLDER --tokenizer {with_tokenizer}"
    for name, what in (
        ("other_tokens", f"has tokens of another tokenizer than {with_tokenizer}/tokenizer.json, that of"),
        ("bytes", "holds bytes, and"),
    ):
        with pytest.raises(ConfigError) as refusal:
            open_run(load_config(with_tokenizer, [*settings, f"data.path={folder}/{name}"]))
        has = " has a tokenizer.json" if name == "bytes" else ""
        assert str(refusal.value) == (f"data.path={folder}/{name} {what} train.init_from={with_tokenizer}{has}: {cure}")
    assert capsys.readouterr().out == ""
    (with_tokenizer / "tokenizer.json").unlink()
    open_run(load_config(with_tokenizer, [*settings, f"data.path={folder}/bytes"]))
    assert capsys.readouterr().out == (
        f"warning: whether data.path={folder}/bytes has the tokens of train.init_from={with_tokenizer} cannot be "
        "checked: it has no tokenizer.json\n"
    )


def test_a_run_that_began_here_has_the_tokens_of_its_data(with_tokenizer, capsys):
    folder = with_tokenizer.parent
    prepare_text(folder / "text.txt", folder / "bytes")
    prepare_text(folder / "text.txt", folder / "bpe", tokenizer="bpe", vocab_size=260)
    capsys.readouterr()

    def check(trained_on: str, data: str) -> None:
        (folder / "run_here").mkdir(exist_ok=True)
        (folder / "run_here" / "config.yaml").write_text(f"data:\n  path: {folder}/{trained_on}\n")
        begun = dataclasses.replace(Config().train, init_from=f"{folder}/run_here")
        check_tokens(Config(train=begun, data=DataConfig(path=f"{folder}/{data}")), new=True)

    for trained_on, data in (("bytes", "text.txt"), ("text.txt", "bytes"), ("bpe", "bpe"), ("tokens", "tokens")):
        check(trained_on, data)
    for trained_on, data, what in (
        ("bytes", "bpe", r"has the tokens of its tokenizer.json, and .* was trained with bytes: prepare the text by"),
        ("bpe", "bytes", r"holds bytes, and .* has a tokenizer.json: prepare a folder by .* --tokenizer .*/bpe$"),
        ("bpe", "tokens", r"has tokens of another tokenizer than .*/bpe/tokenizer.json, that of"),
    ):
        with pytest.raises(ConfigError, match=rf"^data.path={folder}/{data} {what}"):
            check(trained_on, data)
    assert capsys.readouterr().out == ""
    check("gone", "bpe")
    assert capsys.readouterr().out.endswith(f"the data that it was trained with, {folder}/gone, is not here\n")


def test_folders_of_an_older_version_are_not_passed_over_in_silence(with_tokenizer, capsys):
    data = with_tokenizer.parent / "tokens"
    meta = json.loads((data / "meta.json").read_text())
    del meta["begin_of_text"], meta["tokenizer_crc32"]
    capsys.readouterr()
    (data / "meta.json").write_text(json.dumps(meta))
    for new in (True, False):
        check_tokens(Config(data=DataConfig(path=str(data))), new)
        assert capsys.readouterr().out.startswith(f"warning: data.path={data} was made by an older version, which enc")
    made = Tokenizer.from_file(str(data / "tokenizer.json"))
    made.enable_truncation(max_length=8)
    made.save(str(data / "tokenizer.json"))
    check_tokens(Config(data=DataConfig(path=str(data))), new=False)
    problem = f"data.path={data} was made by an older version, which obeyed the truncation in {data}/tokenizer.json"
    assert capsys.readouterr().out == f"warning: {problem}: text is missing, or padding is in between\n"
    with pytest.raises(DataError) as refusal:
        check_tokens(Config(data=DataConfig(path=str(data))), new=True)
    again = "make the folder again with scripts/prepare_text.py TEXT FOLDER --tokenizer"
    assert str(refusal.value) == f"{problem}: {again} {data}"


def test_an_imported_model_is_sampled_with_its_tokenizer(with_tokenizer, tmp_path_factory, monkeypatch, capsys):
    """Wherever the command runs, and whether the text that the run names is there."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    words = f"generate --run {with_tokenizer} --prompt quick --tokens 3".split()
    data = with_tokenizer.parent / "tokens"
    capsys.readouterr()
    for path in ([], [f"data.path={data}"]):
        monkeypatch.setattr(sys, "argv", [*words, *path])
        generate.main()
        continued = capsys.readouterr().out.removeprefix("quick").split()
        assert set(continued) <= set(WORDS), "words, not bytes"
    text = (with_tokenizer / "tokenizer.json").read_text()
    (with_tokenizer / "tokenizer.json").write_text(
        text.replace('"quick": 1', '"quick": 2').replace('"brown": 2', '"brown": 1')
    )
    with pytest.raises(DataError) as refusal:
        generate.main()
    assert str(refusal.value) == (
        f"{with_tokenizer}/tokenizer.json and {data}/tokenizer.json are different tokenizers: name by data.path the "
        "folder that was prepared with the first one, or remove the first one, if the run was trained with the second"
    )
    (with_tokenizer / "tokenizer.json").unlink()
    text_file = with_tokenizer.parent / "text.txt"
    monkeypatch.setattr(sys, "argv", [*words, f"data.path={text_file}"])
    with pytest.raises(DataError, match=r"has no tokenizer.json, and its model was not trained here: put the model's"):
        generate.main()


def test_an_upcycled_model_begins_as_the_dense_one():
    """All its experts are alike, and the weights of those that a token chose sum to 1."""
    dense = model_of("llama")
    moe = MoEConfig(num_experts=4, top_k=2, intermediate_size=dense.intermediate_size, capacity_factor=None)
    model = dataclasses.replace(dense, moe=moe)
    settings = TrainConfig(init_from=str(GOLDEN / "llama"), upcycle=True)
    params = params_of(Config(model=model, mesh=MeshConfig(data=1, expert=2), train=settings))
    token_BN, logit_BNV = expected("llama")
    np.testing.assert_allclose(logits_of(jax.device_get(params), token_BN, model), logit_BNV, rtol=0, atol=2e-5)
    router = params["segments"][0][0]["moe"]["router"]
    assert 0.005 < router.std() < 0.02, "random"
