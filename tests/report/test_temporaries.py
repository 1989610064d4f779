"""Bytes of temporaries in the dumps that XLA:TPU writes."""

import os
from pathlib import Path

from moe_jax.report.temporaries import allocated_temporaries, dump_options

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


def test_temporaries_are_those_in_main_memory(tmp_path: Path) -> None:
    assert allocated_temporaries(tmp_path) is None
    (tmp_path / "module_0000.jit_step.after_optimizations-buffer-assignment.txt").write_text(DUMP)
    (tmp_path / "module_0000.jit_step.after_optimizations-buffer-assignment-values.txt").write_text("Used values:\n")
    assert allocated_temporaries(tmp_path) == 2_600_157_728
    assert dump_options(str(tmp_path)) == {"xla_dump_to": str(tmp_path)}


def test_of_several_programs_the_last_one_counts(tmp_path: Path) -> None:
    for number, size in enumerate(("2600157728", "17")):
        path = tmp_path / f"module_{number}.jit_step.after_optimizations-buffer-assignment.txt"
        path.write_text(DUMP.replace("2600157728", size))
        os.utime(path, (0, number))
    assert allocated_temporaries(tmp_path) == 17
