"""Tasks of lm-eval, EleutherAI's evaluation harness, which the extra `eval` installs."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.errors import ConfigError
from moe_jax.run.harness_model import HarnessModel


class TaskResult(NamedTuple):
    """The values of one task, or of a group of tasks."""

    name: str
    values: dict[str, float]  # by metric, e.g. acc and acc_stderr; of a filter that is not the plain one: acc:FILTER


def load_tasks(names: Sequence[str], folder: Path | None) -> Any:
    """Return lm-eval's manager of tasks, with which the named ones can be loaded: its own, and those in a folder.

    A task may run Python code and download its data. Raises ConfigError if lm-eval is not installed, or if a task is
    missing or cannot be loaded.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--tasks={','.join(names)} needs lm-eval, and {error.name} is not installed: pip install -e '.[eval]'"
        ) from None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-folder={folder} is not a folder: name one with the YAML files of tasks")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about intended behaviour
    where = None if folder is None else str(folder)
    try:
        manager = TaskManager(include_path=where, include_defaults=where is None)
        if where is not None and not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=where)
        if missing := sorted(set(names) - set(manager.all_tasks)):
            there = f" nor of --task-folder={folder}" if folder else ""
            raise ConfigError(f"--tasks={missing[0]} is no task of lm-eval{there}: use one that lm-eval ls tasks lists")
        manager.load(list(names))
    except ConfigError:
        raise
    except Exception as error:  # of a file, a download, or a task's own code
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--tasks={','.join(names)} cannot be loaded ({type(error).__name__}: {problem}): repair the task, or use "
            "one whose data is on this machine"
        ) from None
    return manager


def run_tasks(
    manager: Any, names: Sequence[str], model: HarnessModel, limit: int | None, fewshot: int | None
) -> list[TaskResult]:
    """Return the values of the tasks, and of the groups among them.

    `limit` is the most documents of each task, and `fewshot` the number of examples before each; None: as a task says.
    With a chat template, the text of each document is a question, and the examples before it are earlier turns.
    """
    import lm_eval

    chat = {"apply_chat_template": True, "fewshot_as_multiturn": True} if model.template else {}
    found = lm_eval.simple_evaluate(
        model=_as_lm(model),
        tasks=list(names),
        task_manager=manager,
        num_fewshot=fewshot,
        limit=limit,
        log_samples=False,
        torch_random_seed=None,
        **chat,
    )
    return [TaskResult(name, _values(values)) for name, values in found["results"].items()]


def _values(of_task: dict[str, Any]) -> dict[str, float]:
    """The numbers among the values of a task, whose names are those of a metric and a filter."""
    values = {}
    for key, value in of_task.items():
        metric, _, own_filter = key.partition(",")
        if isinstance(value, int | float) and own_filter:
            values[metric if own_filter == "none" else f"{metric}:{own_filter}"] = float(value)
    return values


def _as_lm(model: HarnessModel) -> Any:
    """The model as an instance of lm-eval's class."""
    from lm_eval.api.model import LM

    class RunModel(LM):
        def loglikelihood(self, requests: Any) -> Any:
            return [tuple(score) for score in model.loglikelihood(requests)]

        def loglikelihood_rolling(self, requests: Any) -> Any:
            return model.loglikelihood_rolling(requests)

        def generate_until(self, requests: Any) -> Any:
            return model.generate_until(requests)

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return model.rendered(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: Any = False) -> str:
            return model.template.source if model.template else ""

        @property
        def tokenizer_name(self) -> str:  # of a cache of requests, which is not used
            return "run"

    return RunModel()
