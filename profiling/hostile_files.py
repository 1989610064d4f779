"""Contents of files that every command has to reject, by the name of each input."""

from typing import Any

DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_OBJECT = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
DIGITS = b"1" + b"0" * 400
SURROGATE = "\ud800"
JSON = {
    "not_json": b"{",
    "not_utf8": b"\xff\xfe\xff",
    "empty": b"",
    "deep": DEEP,
    "deep_object": DEEP_OBJECT,
    "null": b"null",
}
_LAUGHS = b"".join(b"b%d: &b%d [%s]\n" % (i, i, b",".join([b"*b%d" % (i - 1) if i else b"x"] * 10)) for i in range(9))

CONFIGS: dict[str, bytes] = {
    "python": b"!!python/object/apply:os.system ['true']",
    "python_name": b"train: {steps: !!python/name:os.system }",
    "tag_of_int": b'train: {steps: !!int ""}',
    "tag_of_float": b'optimizer: {eps: !!float ""}',
    "tag_of_binary": b"log: {dir: !!binary aGVsbG8=}",
    "tag_of_set": b"train: !!set {steps}",
    "own_tag": b"train: !mine {steps: 1}",
    "deep_lists": b"[" * 100_000,
    "deep_sections": b"{a: " * 100_000,
    "deep_dashes": b"- " * 10_000 + b"1",
    "deep_indents": b"".join(b" " * i + b"a:\n" for i in range(1200)),
    "laughs": _LAUGHS,
    "itself": b"train: &t {steps: *t}",
    "unknown_alias": b"train: *t",
    "merge": b"base: &b {steps: 1}\ntrain: {<<: *b}",
    "list": b"- 1",
    "number": DIGITS,
    "text": b"hello",
    "digits": b"train: {steps: " + b"9" * 5000 + b"}",
    "large_number": b"train: {steps: " + DIGITS + b"}",
    "large_float": b"optimizer: {eps: 1e999}",
    "nul": b"train: {steps: 1}\0",
    "nul_escaped": b'log: {dir: "a\\0b"}',
    "surrogate": b'log: {dir: "\\ud800"}',
    "surrogate_bytes": b"log: {dir: \xed\xa0\x80}",
    "latin1": b"log: {dir: caf\xe9}",
    "utf16": "train: {steps: 1}".encode("utf-16"),
    "unclosed": b"train: {steps: 1",
    "tabs": b"train:\n\tsteps: 1\n",
    "twice": b"train: {steps: 1, steps: 2}",
    "two_documents": b"---\ntrain: {steps: 1}\n---\ntrain: {steps: 2}\n",
    "list_as_key": b"? [a]\n: 1",
    "null_as_key": b"? \n: 1",
    "number_as_key": b"1: 2",
    "text_as_section": b"train: steps",
    "list_as_section": b"train: [steps]",
    "unknown": b"trian: {steps: 1}",
    "version": b"%YAML 9.9\n---\ntrain: {steps: 1}",
    "two_megabytes": b"# " + b"x" * 2**21,
    "many_values": b"tune: {over: [" + b"1," * 20_000 + b"]}",
}

_OK = b'{"step": 1, "loss": 2.0, "tokens": 100}\n'
METRICS: dict[str, bytes] = {
    "text_as_loss": _OK + b'{"step": 2, "loss": "low"}\n',
    "list_as_loss": _OK + b'{"step": 2, "loss": [1.0]}\n',
    "object_as_loss": b'{"step": 2, "loss": {"a": 1}}\n' + _OK,
    "true_as_rate": b'{"step": 2, "learning_rate": true}\n' + _OK,
    "huge_loss": _OK + b'{"step": 2, "loss": ' + DIGITS + b"}\n" + _OK,
    "loss_of_1e308": _OK + b'{"step": 2, "loss": 1e308}\n',
    "huge_step": b'{"step": ' + b"9" * 300 + b"}\n" + _OK,
    "negative_step": b'{"step": -1}\n' + _OK,
    "fractional_step": b'{"step": 1.5}\n' + _OK,
    "no_step": b'{"loss": 1.0}\n' + _OK,
    "step_is_nan": b'{"step": 1, "not_finite": {"step": "nan"}}\n' + _OK,
    "not_finite_list": b'{"step": 1, "not_finite": [1]}\n' + _OK,
    "not_finite_text": b'{"step": 1, "not_finite": {"loss": "low"}}\n' + _OK,
    "ragged_load": b'{"step": 1, "expert_load": [[0.5, 0.5], [1.0]]}\n',
    "changing_load": b'{"step": 1, "expert_load": [[0.5, 0.5]]}\n{"step": 2, "expert_load": [[1.0]]}\n',
    "flat_load": b'{"step": 1, "expert_load": [0.5, 0.5]}\n',
    "text_load": b'{"step": 1, "expert_load": [["a", "b"]]}\n',
    "load_is_text": b'{"step": 1, "expert_load": "even"}\n',
    "ranks_are_text": b'{"step": 1, "rank_load": ["a"]}\n',
    "ranks_change": b'{"step": 1, "rank_load": [1.0]}\n{"step": 2, "rank_load": [1.0, 2.0]}\n',
    "moved_nowhere": b'{"step": 1, "rank_load": [1.0], "migrated_blocks": [7]}\n',
    "moved_nothing": b'{"step": 1, "rank_load": [1.0], "migrated_blocks": []}\n',
    "moved_without_loads": b'{"step": 1, "migrated_blocks": [0]}\n',
    "deep_record": b'{"step": 1, "note": ' + DEEP + b"}\n" + _OK,
    "binary": bytes(range(256)) * 4 + b"\n" + _OK,
    "list": b"[1, 2]\n" + _OK,
    "empty": b"",
}

METAS: dict[str, bytes | dict[str, Any]] = {
    **JSON,
    "other_format": {"format": 10**9},
    "text_as_count": {"train_tokens": "many"},
    "huge_count": {"train_tokens": 10**300},
    "count_of_401_digits": b'{"format": 1, "train_tokens": ' + DIGITS + b"}",
    "negative_count": {"train_tokens": -5},
    "true_as_count": {"train_tokens": True},
    "unknown_type": {"dtype": "float64"},
    "list_as_type": {"dtype": ["uint8"]},
    "huge_vocabulary": {"vocab_size": 10**12},
    "no_sources": {"sources": None},
}

CONVERTED: dict[str, bytes | dict[str, Any]] = {
    **JSON,
    "wrong_type": {"num_hidden_layers": "two"},
    "huge_layers": {"num_hidden_layers": 10**9},
    "huge_experts": {"num_local_experts": 10**9},
    "huge_width": {"hidden_size": 10**9},
    "huge_vocabulary": {"vocab_size": 10**12},
    "width_of_401_digits": b'{"model_type": "mixtral", "hidden_size": ' + DIGITS + b"}",
    "infinite_theta": {"rope_theta": float("inf")},
    "no_theta": {"rope_theta": float("nan"), "rope_parameters": None},
    "negative_heads": {"num_attention_heads": -4},
    "no_heads": {"num_attention_heads": 0},
    "true_as_heads": {"num_attention_heads": True},
    "unknown_model": {"model_type": "eliza"},
    "list_as_model": {"model_type": ["mixtral"]},
    "surrogate_as_model": {"model_type": SURROGATE},
    "text_as_section": {"rope_scaling": "linear", "rope_parameters": "linear"},
}

_MACHINE = b'"devices": 8, "processes": 1, "node_devices": 8, "provenance": {}'
PROFILES: dict[str, bytes] = {
    **JSON,
    "list": b"[]",
    "huge": b'{"platform": "gpu", "devices": ' + DIGITS + b"}",
    "text_as_curves": b'{"platform": "gpu", "curves": "c", ' + _MACHINE + b"}",
    "list_as_platform": b'{"platform": [], "curves": [], ' + _MACHINE + b"}",
    "no_curves": b'{"platform": "gpu", "curves": [], ' + _MACHINE + b"}",
}
TASK_TIMES: dict[str, bytes] = {
    "deep": DEEP,
    "not_json": b"{",
    "no_parts": b'{"expert": {"0": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}}',
    "parts_of_401_digits": b'{"expert": {"' + DIGITS + b'": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}}',
    "strange_parts": '{"expert": {"²": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}}'.encode(),
    "huge_seconds": b'{"expert": {"1": {"forward_s": ' + DIGITS + b', "backward_s": 1, "weight_s": 1}}}',
}
TUNED: dict[str, bytes] = {"deep": DEEP, "not_json": b"{", "object": b"{}", "text": b'["a"]'}

PARTS = '''"""Parts of other forms than settings take."""

import jax.numpy as jnp

from moe_jax.models.dispatchers import DISPATCHERS
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.hooks.protocol import Hooks
from moe_jax.schedule.policies import POLICIES

NUMBER = 3
NO_ARGUMENTS = Hooks(before_layer=lambda: 1)
SHORTER = Hooks(before_layer=lambda x_TD: x_TD[:1])
ONE = DISPATCHERS["capacity"]._replace(permute=lambda x_TD: x_TD)
PAIRLESS = DISPATCHERS["capacity"]._replace(permute=lambda *_: None)
PARTLESS = POLICIES["unified"]._replace(parts=lambda degree: None)
TOO_FINE = POLICIES["unified"]._replace(parts=lambda degree: (10**9, 10**9))
LISTLESS = POLICIES["unified"]._replace(orders=lambda shape: {"compute": [1]})
BROKEN = POLICIES["unified"]._replace(orders=lambda shape: 1 // 0)


def few(logit_TE):
    return logit_TE


def nothing(logit_TE, moe):
    return None


def text(logit_TE, moe):
    return "experts"


def flat(logit_TE, moe):
    return TopKRouting(jnp.zeros(3, jnp.int32), jnp.zeros(3), logit_TE)


def branch(logit_TE, moe):
    return None if logit_TE[0, 0] > 0 else logit_TE


def fails(logit_TE, moe):
    return 1 // 0
'''
