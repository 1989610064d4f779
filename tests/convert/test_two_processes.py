"""A model that two processes import together."""

import sys

from moe_jax.checkpoint.files import newest_checkpoint
from moe_jax.checkpoint.record import read_record
from moe_jax.checkpoint.storage import DiskStorage
from moe_jax.cli import convert
from moe_jax.launch.supervisor import reserved_port
from tests.convert.golden import GOLDEN
from tests.distributed.test_startup_barrier import ended


def test_two_processes_with_their_own_devices_import_what_one_process_does(tmp_path, monkeypatch):
    command = ["import", str(GOLDEN / "mixtral"), "--out"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    with reserved_port() as port:
        flags = [f"--coordinator=127.0.0.1:{port}", "--num-processes=2"]
        process = [sys.executable, "-m", "moe_jax.convert", *command, str(together), *flags]
        codes, errors = ended([[*process, f"--process-id={rank}"] for rank in range(2)])
    assert codes == [0, 0], errors
    monkeypatch.setattr(sys, "argv", ["convert", *command, str(alone)])
    convert.main()
    assert newest_checkpoint(together) == newest_checkpoint(alone) == 0
    records = [read_record(DiskStorage(run), 0) for run in (alone, together)]
    assert records[0].leaves == records[1].leaves, "shapes and digests, which do not depend on the devices"
    assert [record.mesh["data"] for record in records] == [8, 2]
