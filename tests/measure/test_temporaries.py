"""Bytes of temporaries, on TPUs those in the dumps that XLA:TPU writes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Compiled

from moe_jax.errors import UserError
from moe_jax.measure.temporaries import Temporaries, allocated_temporaries, compile_and_measure

# of a step of eight blocks, with the values of each allocation cut short
DUMP = """BufferAssignment:
allocation 0: size 65536, parameter 6, shape |f32[32,512]| at ShapeIndex {}, maybe-live-out, is thread-local:
 value: <3 param.6 @0> (size=65536,offset=0): f32[32,512]{1,0:T(8,128)}
allocation 39: size 4096, constant:
allocation 2157: size 13312, color 6, preallocated-temp:
 value: <4 copy-start.532{0} @1> (size=13312,offset=0): f32[8,416]{1,0:T(4,128)S(6)}
allocation 2159: size 2600157728, preallocated-temp:
 value: <719 empty.240 @0> (size=2621440,offset=1305231360): bf16[2560,2,256]{2,1,0:T(2,128)(2,1)}
allocation 2161: size 50124800, color 1, preallocated-temp:
"""
NAME = "module_0000.jit_step.after_optimizations-buffer-assignment.txt"


@pytest.fixture(scope="module")
def program() -> Compiled:
    """A program of simulated devices with a temporary array, for what a compiler without a dump reports."""
    return jax.jit(lambda x: jnp.sort(x) @ x).lower(jnp.ones((64, 64))).compile()


def reported(program: Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes > 0
    return int(memory.temp_size_in_bytes)


def test_temporaries_are_those_in_main_memory(tmp_path: Path) -> None:
    assert allocated_temporaries(tmp_path) is None
    (tmp_path / NAME).write_text(DUMP)
    (tmp_path / "module_0000.jit_step.after_optimizations-buffer-assignment-values.txt").write_text("Used values:\n")
    assert allocated_temporaries(tmp_path) == 2_600_157_728


def test_newer_compilers_write_a_page(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(DUMP.replace("preallocated-temp", "page 0, preallocated-temp"))
    assert allocated_temporaries(tmp_path) == 2_600_157_728


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    """Not read as no temporaries at all."""
    (tmp_path / NAME).write_text(DUMP.replace("preallocated-temp", "sheet 0, preallocated-temp"))
    with pytest.raises(UserError, match="in an unknown form: use a version"):
        allocated_temporaries(tmp_path)


def test_of_several_programs_the_last_one_counts(tmp_path: Path) -> None:
    for number, size in enumerate(("2600157728", "17")):
        path = tmp_path / f"module_{number}.jit_step.after_optimizations-buffer-assignment.txt"
        path.write_text(DUMP.replace("2600157728", size))
        os.utime(path, (0, number))
    assert allocated_temporaries(tmp_path) == 17


@pytest.mark.parametrize("own_folder", [True, False])
def test_on_tpus_the_dump_counts(program: Compiled, tmp_path: Path, own_folder: bool) -> None:
    """In a folder that is removed, or in that of a dump that was asked for, which stays."""
    folders = []

    def compile_with(options: Mapping[str, Any]) -> Compiled:
        (folder,) = map(Path, options.values())
        assert options.keys() == {"xla_dump_to"}
        (folder / NAME).write_text(DUMP)
        folders.append(folder)
        return program

    asked: dict[str, Any] = {} if own_folder else {"xla_dump_to": str(tmp_path)}
    assert compile_and_measure(compile_with, "tpu", asked) == (program, Temporaries(2_600_157_728, False))
    assert folders[0].exists() != own_folder


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
def test_without_a_dump_the_compilers_report_counts(program: Compiled, platform: str) -> None:
    """It is an upper bound on TPUs. Other platforms have no options for a dump."""
    given: list[Mapping[str, Any]] = []

    def compile_with(options: Mapping[str, Any]) -> Compiled:
        given.append(options)
        return program

    found = compile_and_measure(compile_with, platform)
    assert found == (program, Temporaries(reported(program), platform == "tpu"))
    assert bool(given[0]) == (platform == "tpu")
