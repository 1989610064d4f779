"""Sampling of text from a trained model, on one device."""

import dataclasses
import functools
import itertools
import unicodedata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from moe_jax.config import Config, MeshConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.data.tokenizer import Tokenizer, load_tokenizer
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import write_atomically
from moe_jax.models.decode import sample
from moe_jax.models.stages import in_order
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import found_devices, make_mesh
from moe_jax.parallel.sharding import REPLICATED


def one_device_mesh() -> jax.sharding.Mesh:
    """A mesh of this process's first device; all axes have size 1."""
    found_devices()
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def sample_tokens(
    config: Config, params: Any, prompt: NDArray[np.int32], count: int, temperature: float, seed: int
) -> NDArray[np.int32]:
    """Sample `count` tokens that follow a non-empty prompt.

    `params` are on one device or on a mesh of this process, in the layout of the config's pipeline stages. The context
    is at most `data.seq_len` tokens, as in training: longer text is sampled in windows, each of which begins with the
    second half of the preceding one.
    """
    mesh, length = one_device_mesh(), config.data.seq_len
    params = in_order(jax.device_put(params, jax.sharding.NamedSharding(mesh, REPLICATED)), Stages.of(config))
    # the kernels of the run may not exist for this device, and its exchange may need several devices
    train = dataclasses.replace(config.train, grouped_product="auto", attention_kernel="auto")
    exchange = dataclasses.replace(config.exchange, algorithm="flat", ranks_per_node=None)
    here = dataclasses.replace(config, train=train, exchange=exchange)
    body = functools.partial(sample, model=config.model, compute=ComputeConfig.of(here, mesh))
    window = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False))
    text = list(prompt)
    while len(text) < len(prompt) + count:
        known = min(len(text), max(1, length // 2)) if len(text) >= length else len(text)
        padded = np.zeros((1, length), np.int32)
        padded[0, :known] = text[-known:]
        key = jax.random.fold_in(jax.random.key(seed), len(text))
        text += np.asarray(window(params, padded, np.int32(known), key, np.float32(temperature)))[0, known:].tolist()
    return np.array(text[len(prompt) : len(prompt) + count], np.int32)


def sample_text(
    config: Config, params: Any, tokenizer: Tokenizer, prompt: str, count: int, temperature: float, seed: int
) -> str:
    """The prompt and a sampled continuation as text. Raises ConfigError for an invalid prompt."""
    before = encode_prompt(config, tokenizer, prompt)
    tokens = sample_tokens(config, params, before, count, temperature, seed)
    return prompt + _printable(continuation(tokenizer, before.tolist(), tokens.tolist()))


def continuation(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """The text of `tokens` that follow the tokens `before`.

    Decoding `tokens` alone could lose a space, since a tokenizer may remove the space before the first token.
    """
    known, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    return whole[len(list(shared)) :]


def _printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, replaced by U+FFFD.

    A model of bytes can sample such characters. Tabs and line breaks stay.
    """
    text = text.replace("\r\n", "\n")
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)


def encode_prompt(config: Config, tokenizer: Tokenizer, prompt: str) -> NDArray[np.int32]:
    """The tokens of a prompt, preceded by those that begin a text.

    Raises ConfigError if there are no tokens, or if one is outside the model's vocabulary.
    """
    tokens, known = [*tokenizer.begin_of_text, *tokenizer.encode(prompt)], config.model.vocab_size
    if not tokens:
        raise ConfigError("the prompt is empty: give at least one character, e.g. a line break")
    if max(tokens) >= known:
        raise ConfigError(
            f"the prompt has token {max(tokens)}, and the model knows model.vocab_size={known}: use the tokenizer that "
            "it was trained with"
        )
    return np.array(tokens, np.int32)


def write_sample(config: Config, params: Any, run: Path) -> str:
    """Write a sample to the run's sample.txt, at temperature 0.8; returns the text.

    The prompt and the number of tokens are `log.sample_prompt` and `log.sample_tokens`.
    """
    log, tokenizer, seed = config.log, load_tokenizer(Path(config.data.path)), config.train.seed
    text = sample_text(config, params, tokenizer, log.sample_prompt, log.sample_tokens, temperature=0.8, seed=seed)
    write_atomically(run / "sample.txt", text)
    return text
