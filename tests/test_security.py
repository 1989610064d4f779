"""What others can do to a run: what they may make it load, name and run, and where it listens."""

import ast
import importlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import tensorstore

from moe_jax.checkpoint.files import DamagedError, check_files, newest_checkpoint
from moe_jax.checkpoint.record import Record
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError
from tests.launched.two_hosts import Hosts

ROOT = Path(__file__).parents[1]
UNPICKLING = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
ARCHIVES = {"tarfile", "zipfile"}
RUNNING = {"eval", "exec", "compile", "__import__", "import_module", "run_path", "run_module", "exec_module"}
RUNNING |= {"os.system", "os.popen", "os.execv", "os.execvp", "deserialize_and_load", "unpack_archive"}
LOADING = {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "np.load", "numpy.load"}
COMMANDS = ("convert", "launch", "measure", "plan", "report")
# What is left, and why it may be there.
ALLOWED = {
    ("moe_jax/config/plugins.py", "import_module"),  # parts that six settings name
    ("moe_jax/config/registry.py", "import_module"),  # the project's own parts
    ("moe_jax/data/tokenizer.py", "import_module"),  # of the extra `text`
    ("moe_jax/data/array_record_files.py", "import_module"),  # of a package that grain brings where it is built
    ("moe_jax/data/text_index.py", "load"),  # arrays, without pickled objects
    ("moe_jax/run/routing_record.py", "load"),  # the same
    ("moe_jax/data/text_index.py", "zipfile"),  # the error of a damaged file of arrays
    ("profiling/parts.py", "import_module"),  # of the benchmark, each in a process of its own
    ("profiling/docs_commands.py", "shell"),  # of the commands on the project's own pages
    ("profiling/docs_commands.py", "tarfile"),  # what git archives of the project
    ("moe_jax/step/compile_cache.py", "deserialize_and_load"),  # from a folder of this user's
    # the commands: python -m moe_jax.train is moe_jax.cli.train
    *((f"moe_jax/{command}.py", "run_module") for command in ("evaluate", "generate", "train")),
    *((f"moe_jax/{command}/__main__.py", "run_module") for command in COMMANDS),
}


@cache
def tree(file: Path) -> ast.AST:
    return ast.parse(file.read_bytes())


def uses(program: ast.AST) -> Iterator[str]:
    """What a program has that runs, unpickles or unpacks what it is given."""
    for node in ast.walk(program):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            packages = {name.partition(".")[0] for name in [*names, getattr(node, "module", None) or ""]}
            yield from packages & (UNPICKLING | ARCHIVES)
        if isinstance(node, ast.Call):
            target, last = _dotted(node.func)
            if target in RUNNING | LOADING or last in RUNNING - {"compile", "eval"}:
                yield last
            if any(keyword.arg == "shell" for keyword in node.keywords):
                yield "shell"


def _dotted(called: ast.expr) -> tuple[str, str]:
    """The last two names of what is called, and the last."""
    if isinstance(called, ast.Attribute):
        before = f"{called.value.id}." if isinstance(called.value, ast.Name) else "…."
        return before + called.attr, called.attr
    name = called.id if isinstance(called, ast.Name) else "…"
    return name, name


def test_nothing_is_unpickled_unpacked_or_run_but_where_it_is_meant() -> None:
    files = [file for folder in ("moe_jax", "scripts", "profiling") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {(str(file.relative_to(ROOT)), use) for file in files for use in uses(tree(file))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("from pickle import loads", "pickle"),
        ("import os, shelve", "shelve"),
        ("eval(text)", "eval"),
        ("importlib.import_module(name)", "import_module"),
        ("yaml.load(text, yaml.Loader)", "load"),
        ("np.load(path, allow_pickle=True)", "load"),
        ("subprocess.run(text, shell=True)", "shell"),
    ],
)
def test_the_search_finds(line: str, use: str) -> None:
    assert list(uses(ast.parse(line))) == [use]
    assert not list(uses(ast.parse("lowered.compile(); yaml.dump(x); re.findall(x, y); jax.eval_shape(f)")))


def test_six_settings_name_code_and_no_other_does() -> None:
    nodes = [node for file in (ROOT / "moe_jax").rglob("*.py") for node in ast.walk(tree(file))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [ast.unparse(call.args[0]) for call in calls if call.func.id == "load_part"]
    parts = [f"'model.moe.{name}'" for name in ("dispatcher", "gate", "hooks")]
    assert sorted(named) == ["'exchange.algorithm'", *parts, "'optimizer.name'", "'schedule.policy'"]


@pytest.mark.parametrize("tag", ["python/object/apply:os.system", "python/name:os.system", "python/module:os"])
def test_a_config_makes_no_python_objects(tag: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"train: !!{tag} ['touch {tmp_path}/there']\n")
    with pytest.raises(ConfigError, match=r"found a tag \(.*python/.*\), which no setting has at line 1, column 8$"):
        load_config(file)
    assert not (tmp_path / "there").exists()


def crc32c(content: bytes) -> bytes:
    """Castagnoli's, as it ends a manifest."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def test_a_checkpoint_whose_index_names_a_file_outside_is_damaged(tmp_path: Path) -> None:
    """The file is there, and holds what it should."""
    checkpoint = tmp_path / "checkpoints" / "5"
    state = checkpoint / "state"
    state.mkdir(parents=True)
    plain = {"compression": None, "max_inline_value_bytes": 0}
    base = {"driver": "file", "path": f"{state}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "config": plain}).result()
    store.write("array", b"its numbers").result()
    (checkpoint / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1}')
    (state / "_METADATA").write_text("{}")
    (checkpoint / "record").mkdir()
    record = Record(step=5, leaves={}, data={}, config={}, mesh={}, versions={}, tuner=None)
    (checkpoint / "record" / "metadata").write_text(json.dumps(record.to_json()))
    assert newest_checkpoint(tmp_path) == 5, "whole as yet"

    (file,) = (state / "d").iterdir()
    outside = "../" + "x" * (len(file.name) - 1)  # as long as the name in the index
    file.rename(state / outside)
    manifest = (state / "manifest.ocdbt").read_bytes()[:-4].replace(f"d/{file.name}".encode(), outside.encode())
    (state / "manifest.ocdbt").write_bytes(manifest + crc32c(manifest))
    assert (
        outside
        in tensorstore.ocdbt.dump(tensorstore.KvStore.open(base).result()).result()["versions"][-1]["root"]["location"]
    )
    with pytest.raises(DamagedError):
        check_files(tmp_path, 5)


def test_a_checkpoint_of_another_name_is_none(tmp_path: Path) -> None:
    for name in ("..5", "5..", "+5", "0x5", "-1", "٥"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None


def test_a_launched_run_listens_where_it_should_and_strangers_do_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers, one of which listens at 127.0.0.2, as rank 0 does. Gloo listens at the address of the host's name;
    training adds none. Strangers call all ports from the start, and some stay.
    """
    monkeypatch.syspath_prepend(ROOT / "profiling")
    poking = importlib.import_module("chaos_poke")
    strangers, rng = poking.Strangers(), random.Random(0)
    with Hosts(tmp_path, "tests.launched.joined", address="127.0.0.2") as hosts, closing(strangers):

        def listening(process: int) -> set[str]:
            return {port.address for port in poking.listening_ports([process])}

        def poke() -> set:
            tree = {id for launcher in hosts.launchers.values() for id in poking.process_tree(launcher.pid)}
            ports = poking.listening_ports(tree)
            for port in ports:
                strangers.poke(port, rng)
            return ports

        for host in (0, 1):
            hosts.start(host, "--grace=60", "--retries=0")
        poked, deadline = set(), time.monotonic() + 120
        while not (hosts.ids(0) and hosts.ids(1)):
            poked |= poke()
            assert time.monotonic() < deadline, hosts.output(0) + hosts.output(1)
        own = socket.gethostbyname(socket.gethostname())
        assert [listening(hosts.launchers[host].pid) for host in (0, 1)] == [{"127.0.0.2"}, set()]
        assert [listening(*hosts.ids(host)) for host in (0, 1)] == [{"127.0.0.2", own}, {own}]
        poked |= poke()
        for host in (0, 1):
            os.kill(*hosts.ids(host), signal.SIGUSR1)
        for host in (0, 1):
            hosts.wait_for(host, f"rank {host} is well", seconds=60)
        hosts.launchers[0].terminate()
        hosts.codes(seconds=90)
    assert len(poked) >= 4, "the launcher's, the coordinator's, and Gloo's of two processes"
