"""A new built-in part is one file: a copy of the package with one more of each kind plans and trains with them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_jax
from moe_jax.config import Config, facts, registry
from moe_jax.config.facts import Facts, GateFacts, PolicyFacts
from moe_jax.config.registry import EXCHANGE_FACTS, GATE_FACTS, Registry
from moe_jax.errors import ConfigError
from moe_jax.plan.exchange import ALGORITHMS

PAGE = (Path(__file__).parents[1] / "docs" / "extend.md").read_text()
FACTS_FROM, OF_LOGITS_FROM = re.findall(r"imported\sfrom\s`([\w.]+)`,\sand\s`of_logits`\sfrom\s`([\w.]+)`", PAGE)[0]
REGISTRIES = {name: each for name, each in vars(registry).items() if isinstance(each, Registry)}
# in the words of the page: what its examples do not show
OTHERS = {
    "models/dispatchers": """
from moe_jax.models.dispatchers import one_hot

DISPATCHER = one_hot.DISPATCHER
""",
    "models/hooks": """
from moe_jax.models.hooks.protocol import Hooks

HOOKS = Hooks(after_layer=lambda y_TD: 2 * y_TD)
""",
    "schedule/pipelines": """
from moe_jax.schedule.pipelines import gpipe

order = gpipe.order
""",
    "step/optimizers": """
from moe_jax.step.optimizers import lion

scale = lion.scale
""",
    "parallel/reductions": """
import jax


def reduce(x_n, axes):
    return jax.lax.psum(x_n, axes)


def scatter(x_Pm, axes):
    return jax.lax.psum_scatter(x_Pm, axes)
""",
}
MODEL = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_attention_heads": 2,
    "moe": {"num_experts": 4, "top_k": 2, "intermediate_size": 16},
}
SETTINGS = {
    "model": MODEL,
    "data": {"path": "text.txt", "seq_len": 16},
    "optimizer": {"learning_rate": 0.03, "warmup_steps": 0},
    "train": {"steps": 4, "batch_size": 16, "compute_dtype": "float32", "eval_every": 0, "eval_batches": 1},
    "log": {"every": 1, "sample_tokens": 0, "tensorboard": False},
}


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a copy of the package, and the names of its new parts by their settings."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "moe_jax"
    shutil.copytree(Path(moe_jax.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    examples = iter(re.findall(r"`(\w+)\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
    names = {}
    for setting, where, lines in re.findall(r"^\| `([\w.]+)` \| `([\w/]+)` \| (.*?) \|", PAGE, re.MULTILINE):
        name, code = ("new", OTHERS[where]) if where in OTHERS else next(examples)
        declared = "\n".join(re.findall("`(.*?)`", lines))
        kind = declared.partition("FACTS = ")[2].partition("(")[0]
        imported = {kind: FACTS_FROM} | ({"of_logits": OF_LOGITS_FROM} if "of_logits" in declared else {})
        head = "".join(f"from {module} import {each}\n" for each, module in imported.items())
        (package / where / f"{name}.py").write_text(f"{head}{code}\n{declared}\n")
        names[setting] = name
    assert len(names) == len(REGISTRIES)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (folder / "tiny.yaml").write_text(json.dumps(SETTINGS))
    return folder, names


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_JAX = "import sys; sys.modules['jax'] = None; import runpy; runpy.run_module('moe_jax.plan', run_name='__main__')"


def test_they_plan_without_jax(added: tuple[Path, dict[str, str]]) -> None:
    """The planner tries the policy and the order of stages, and takes all parts that it is given."""
    folder, names = added
    words = [f"{setting}={name}" for setting, name in names.items() if setting != "exchange.algorithm"]
    words += ["mesh.pipeline=2", "exchange.reduction=all_reduce", "schedule.grad_reduce=end", "schedule.microbatches=2"]
    output = run(folder, "-c", NO_JAX, "--model", "tiny.yaml", "--cluster", "h100x8", *words)
    assert "first_in 2, new" in output
    tried = "from moe_jax.plan.candidates import pipelines, schedules; print(*pipelines(), *schedules())"
    assert {"'pipeline': 'new'", "'policy': 'first_in'"} <= set(re.findall(r"'\w+': '\w+'", run(folder, "-c", tried)))


def test_they_train(added: tuple[Path, dict[str, str]]) -> None:
    folder, names = added
    words = [f"{setting}={name}" for setting, name in names.items() if setting != "schedule.pipeline"]
    words += ["mesh.cpu_devices=4", "mesh.data=2", "mesh.expert=2", "schedule.microbatches=2", "log.dir=run"]
    run(folder, "-m", "moe_jax.train", "--config", "tiny.yaml", *words)
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [record["cross_entropy"] for record in records if "cross_entropy" in record]
    assert losses[-1] < losses[0]


def test_a_part_is_listed_by_its_name_and_a_typo_is_answered_with_it(added: tuple[Path, dict[str, str]]) -> None:
    folder, names = added
    code = "from moe_jax.config.yaml_io import load_config; load_config(None, sys.argv[1:])"
    for setting, name in names.items():
        words = [sys.executable, "-c", f"import sys\n{code}", f"{setting}={name}x"]
        output = subprocess.run(words, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True)
        assert f"did you mean {name}?" in output.stderr.decode()


@pytest.mark.parametrize("name", REGISTRIES)
def test_what_is_read_is_what_the_file_declares(name: str) -> None:
    kind = REGISTRIES[name]
    assert {part: module.FACTS for part, module in kind.modules().items()} == dict(kind)


def test_every_kind_has_its_facts() -> None:
    kinds = {each for each in vars(facts).values() if isinstance(each, type) and issubclass(each, Facts)} - {Facts}
    assert {type(next(iter(each.values()))) for each in REGISTRIES.values()} == kinds


def test_exchanges_are_counted_by_a_form_that_there_is() -> None:
    assert {each.counted_as for each in EXCHANGE_FACTS.values()} == {"ring", *ALGORITHMS}


def test_what_is_elsewhere_has_the_defaults() -> None:
    assert GATE_FACTS.of("sharp:choose") == GateFacts()
    assert registry.POLICY_FACTS.of("first_in:POLICY") == PolicyFacts()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "FACTS = GateFacts(splits=jax)",
            ": module 'moe_jax.config.facts' has no attribute 'jax': use plain values and names of "
            "moe_jax/config/facts.py",
        ),
        (
            "FACTS = GateFacts(split=True)",
            ": GateFacts.__init__() got an unexpected keyword argument 'split': use plain values and names of "
            "moe_jax/config/facts.py",
        ),
        ("FACTS = PolicyFacts()", " must be a GateFacts, not PolicyFacts"),
    ],
)
def test_a_wrong_declaration_names_its_file(source: str, message: str) -> None:
    with pytest.raises(TypeError) as error:
        GATE_FACTS.declared("wrong", f"import jax\n{source}")
    output = re.sub(r"\. Did you mean '\w+'\?", "", str(error.value))  # of Python 3.13
    assert output == f"moe_jax.models.gates.wrong: FACTS{message}"


@pytest.mark.parametrize(
    ("kind", "lines", "missing"),
    [
        ("GATE_FACTS", "FACTS = GateFacts()", "GATE"),
        ("GATE_FACTS", "FACTS = GateFacts()\nGATE: Gate = of_logits(choose)", None),
        ("GATE_FACTS", "if True:\n    from other import choose as GATE\nFACTS = GateFacts()", None),
        ("POLICY_FACTS", "FACTS = PolicyFacts()\nprint(POLICY)", "POLICY"),
        ("EXCHANGE_FACTS", "FACTS = ExchangeFacts()\ndef start(x, ranks): ...", "finish"),
        ("EXCHANGE_FACTS", "FACTS = ExchangeFacts(ragged=True)", None),
        ("REDUCTION_FACTS", "FACTS = ReductionFacts()\nscatter, other = 1, 2", "reduce"),
        ("REDUCTION_FACTS", "FACTS = ReductionFacts(only_starts=True)", "start and no start_scatter and no finish"),
        ("PIPELINE_FACTS", "FACTS = PipelineFacts()\norder = gpipe.order", None),
    ],
)
def test_a_part_that_lacks_what_its_kind_defines_is_refused_by_file(
    kind: str, lines: str, missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = REGISTRIES[kind]
    folder = tmp_path.joinpath(*like._package.split(".")[1:])
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(lines)
    monkeypatch.setattr(registry, "files", lambda package: tmp_path)
    found = Registry(like._package, like._kind, like._defines)
    assert list(found) == ["mine"]
    if missing is None:
        found.check()
        return
    assert found.modules() == {}, "it is not imported, so that the commands start and can report what is wrong"
    with pytest.raises(ConfigError) as error:
        found.check()
    assert str(error.value) == (
        f"{like._package.replace('.', '/')}/mine.py declares FACTS and defines no {missing}: add it (docs/extend.md), "
        "or remove FACTS if the file is no part"
    )


def test_every_config_asks_every_registry() -> None:
    assert list(registry.REGISTRIES) == list(REGISTRIES.values())
    with pytest.MonkeyPatch.context() as patch:
        asked: list[Registry] = []
        patch.setattr(Registry, "check", lambda each: asked.append(each))
        Config()
    assert asked == list(registry.REGISTRIES)
