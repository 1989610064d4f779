"""Text from a trained model, on one device."""

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
    """All axes of size 1 over this process's first device."""
    found_devices()
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def sample_tokens(
    config: Config, params: Any, prompt: NDArray[np.int32], count: int, temperature: float, seed: int
) -> NDArray[np.int32]:
    """`count` tokens that follow a non-empty prompt. `params` lie on one device or on a mesh of this process,
    as the config's pipeline stages hold them.

    The model sees at most the `data.seq_len` tokens it was trained with: text longer than that is sampled in
    windows, each beginning with the second half of the one before.
    """
    mesh, length = one_device_mesh(), config.data.seq_len
    params = in_order(jax.device_put(params, jax.sharding.NamedSharding(mesh, REPLICATED)), Stages.of(config))
    # the run's own kernels may not exist for this device, and its exchange may need more of them
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
    """Prompt and continuation as text. Raises ConfigError as `encode_prompt` does."""
    before = encode_prompt(config, tokenizer, prompt)
    tokens = sample_tokens(config, params, before, count, temperature, seed)
    return prompt + _shown(continuation(tokenizer, before.tolist(), tokens.tolist()))


def continuation(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """The text that tokens add to that of the tokens before them.

    A tokenizer may take away the space before the first token of all, so that tokens decoded alone would lack one.
    """
    known, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    return whole[len(list(shared)) :]


def _shown(text: str) -> str:
    """Without control characters, which a terminal would obey: a model of bytes samples them, too."""
    seen = text.replace("\r\n", "\n")
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in seen)


def encode_prompt(config: Config, tokenizer: Tokenizer, prompt: str) -> NDArray[np.int32]:
    """The prompt's tokens, after those that begin a text.

    Raises ConfigError if there are none, or such that the model does not know.
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
    """Sample as `log` says, at temperature 0.8, into the run's sample.txt; returns the text."""
    log, tokenizer, seed = config.log, load_tokenizer(Path(config.data.path)), config.train.seed
    text = sample_text(config, params, tokenizer, log.sample_prompt, log.sample_tokens, temperature=0.8, seed=seed)
    write_atomically(run / "sample.txt", text)
    return text
