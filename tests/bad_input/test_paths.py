"""Paths are local ones or name what is in a bucket, and log.dir is one that libraries can write checkpoints in."""

import re
import shlex
from pathlib import Path

import pytest

from moe_jax.config import Config, DataConfig, LogConfig, Sections
from moe_jax.config.sections import DataSource
from moe_jax.config.yaml_io import load_config, setting_names
from moe_jax.errors import ConfigError
from moe_jax.paths import BUCKET_SETTINGS, SETTINGS, plain_path
from tests.bad_input.cases import Refusal

A_URL = (
    "is a URL, and only gs://BUCKET/NAME, s3://BUCKET/NAME and paths on this machine (or mounted there) are read and "
    "written: name one"
)
NOT_IN_A_BUCKET = "is a URL, and this is read and written on this machine (or mounted there) only: name a path there"


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("url", ["file:///tmp/x", "https://a.org/x.txt", "gs:/bucket/run", "az://bucket/x"])
def test_a_url_as_a_setting_is_refused_before_anything_is_made(name: str, url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=[f"{name}={url}"])
    assert str(refused.value) == f"{name}={url} {A_URL if name in BUCKET_SETTINGS else NOT_IN_A_BUCKET}"


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_names_what_is_in_a_bucket_or_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", "s3://my-bucket")
    for text, url in (("gs://bucket/a/b/", "gs://bucket/a/b"), ("$STORE/x.json", "s3://my-bucket/x.json")):
        section, key = name.split(".")
        if name in BUCKET_SETTINGS:
            config = load_config(overrides=[f"{name}={text}"])
            assert getattr(getattr(config, section), key) == url
        else:
            with pytest.raises(ConfigError, match=re.escape(NOT_IN_A_BUCKET)):
                load_config(overrides=[f"{name}={text}"])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("gs://", "names the bucket '', and none can have this name: write gs://BUCKET/NAME"),
        ("s3://UPPER/x", "names the bucket 'UPPER', and none can have this name: write gs://BUCKET/NAME"),
        ("gs://bucket", "names a whole bucket: name a folder or a file in it, as in gs://bucket/NAME"),
        ("gs://bucket/", "names a whole bucket: name a folder or a file in it, as in gs://bucket/NAME"),
        (
            "gs://bucket/a//b",
            "has an empty part, . or .. in its path, and names of objects are taken as they are: drop it",
        ),
        (
            "s3://bucket/../x",
            "has an empty part, . or .. in its path, and names of objects are taken as they are: drop it",
        ),
    ],
)
def test_a_url_that_names_nothing_in_a_bucket_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=[f"log.dir={url}"])
    assert str(refused.value) == f"log.dir={url} {reason}"


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        ("train --config {}", "argument --config: {}"),
        ("train --config tiny.yaml log.dir={}", "log.dir={}"),
        ("train --config tiny.yaml data.path={}", "data.path={}"),
        ("train --config tiny.yaml train.init_from={}", "train.init_from={}"),
        ("generate --run {}", "argument --run: {}"),
        ("evaluate {}", "argument RUN: {}"),
        ("evaluate run --data {}", "argument --data: {}"),
        ("report {}", "RUN {}"),
        ("report --compile v5p:2x2x2 --config {}", "--config {}"),
        ("convert export {} --out model", "argument source: {}"),
        ("convert import model --out {}", "argument --out: {}"),
        ("plan --model {} --cluster h100x64", "config file {}"),
        ("plan --model tiny.yaml --cluster {}", "the cluster {}"),
        ("measure --out {}", "argument --out: {}"),
        ("prepare_text {} tokens2", "argument input: {}"),
        ("prepare_text text.txt tokens2 --tokenizer {}", "--tokenizer {}"),
    ],
)
def test_a_url_on_a_command_line_is_refused(line: str, argument: str, assert_refused: Refusal) -> None:
    url = "https://bucket/x.json"
    of_argparse = argument.startswith("argument")
    command = line.split()[0]
    prog = "python scripts/prepare_text.py" if command == "prepare_text" else f"python -m moe_jax.{command}"
    help_text = f": see {prog} --help" if of_argparse else ""
    assert_refused(line.format(url), f"{argument.format(url)} {A_URL}{help_text}")


@pytest.mark.parametrize(
    ("log_dir", "reason"),
    [
        ("$NOWHERE/run", "names the environment variable NOWHERE, which is not set: set it, or write the path out"),
        ("${NOWHERE}", "names the environment variable NOWHERE, which is not set: set it, or write the path out"),
        (
            "~nobody_here/x",
            "names a home folder, ~nobody_here, which is not known: write it out, or ./~nobody_here for such a name",
        ),
    ],
)
def test_what_cannot_be_replaced_in_a_path_is_refused(log_dir: str, reason: str, assert_refused: Refusal) -> None:
    assert_refused(shlex.join(["train", "--config", "tiny.yaml", f"log.dir={log_dir}"]), f"log.dir={log_dir} {reason}")


@pytest.mark.parametrize("name", ["x[1]", "a*b", "a?b", "back\\slash", "x[1]/run"])
def test_a_log_dir_that_libraries_take_for_a_pattern_is_refused(
    name: str, folder: Path, compiled_once: None, assert_refused: Refusal
) -> None:
    found = " ".join(sorted({each for each in name if each in "*?[]\\"}))
    assert_refused(
        shlex.join(["train", "--config", "tiny.yaml", f"log.dir={name}"]),
        f"log.dir={name} can have no checkpoints ({folder / name} has {found} in its name, which their libraries take "
        "for patterns): use another name",
    )


def test_paths_of_sources_are_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(overrides=["data.sources=[{path: ~/a, weight: 1}, {path: b, weight: 1, name: ~c}]"])
    assert [source.path for source in config.data.sources] == ["/home/me/a", "b"]
    assert [source.label for source in config.data.sources] == ["a", "~c"]
    in_bucket = load_config(overrides=["data.sources=[{path: gs://bucket/a/, weight: 1}]"])
    assert [source.path for source in in_bucket.data.sources] == ["gs://bucket/a"]
    with pytest.raises(ConfigError, match=r"^data.sources\[0\].path=~/a is not replaced here: write /home/me/a$"):
        Config(data=DataConfig(sources=(DataSource(path="~/a", weight=1),)))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_home_and_variables_are_replaced_in_every_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/x")
    for text, path in (("~/a", "/home/me/a"), ("$SCRATCH/a", "/scratch/x/a"), ("${SCRATCH}1", "/scratch/x1")):
        config = load_config(overrides=[f"{name}={text}"])
        section, key = name.split(".")
        assert getattr(getattr(config, section), key) == path


def test_other_names_stay_as_they_are() -> None:
    for text in ("runs/a", "./~", "a:b", "../x", "C:", "10:30/run", "a~", "x$", "ä b", "h100x64"):
        assert plain_path(text) == text


def test_a_config_made_in_python_gets_the_path_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ConfigError, match=r"^log.dir=~/x is not replaced here: write /home/me/x$"):
        Config(log=LogConfig(dir="~/x"))
    with pytest.raises(ConfigError, match=r"^data.path=http://x is a URL"):
        Config(data=DataConfig(path="http://x"))


def test_every_setting_that_names_a_file_is_among_them() -> None:
    """Those whose text is no name of a part of the program: a new one has to be put into one of the two."""
    words = {"model.moe.gate", "model.moe.dispatcher", "model.moe.hooks", "schedule.policy", "exchange.algorithm"}
    words |= {
        "optimizer.name",
        "train.grouped_product",
        "log.wandb_project",
        "log.goodput_job",
        "log.sample_prompt",
        "data.text_key",
    }
    texts = set()
    for name in setting_names(Sections):
        *path, key = name.split(".")
        section: object = Sections()
        for part in path:
            section = getattr(section, part)
        hint = section.__annotations__.get(key) if path else None
        if hint in (str, str | None, "str", "str | None"):
            texts.add(name)
    assert texts - words == SETTINGS
