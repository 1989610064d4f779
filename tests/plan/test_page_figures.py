"""Plans that pages quote are what the command prints."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMON = "--cluster h100x64 mesh.data=8 schedule.policy=unified train.batch_size=512 data.seq_len=4096"
FOLDED = "mesh.expert=2 mesh.tensor=4 optimizer.zero=3"
OLMOE = "--model configs/models/olmoe.yaml mesh.expert=8 optimizer.zero=1"
QWEN = f"--model configs/models/qwen3_30b_a3b.yaml {FOLDED}"
MIXTRAL = f"--model configs/models/mixtral_8x7b.yaml {FOLDED}"


@pytest.mark.parametrize(
    ("page", "sentence", "printed"),
    [
        (
            "fully_sharded.md",
            "takes 82 ms for its update and gathers with all axes and 14 ms with `[expert]`; sums of gradients take 98 "
            "and 187 ms, and the optimizer's state 0.9 and 6.9 GB",
            {
                OLMOE: ["gradients 97.9 ms", "optimizer 82.2 ms", "optimizer 864.9 MB", "unified 2,"],
                f"{OLMOE} optimizer.zero_axes=[expert]": ["gradients 187 ms", "optimizer 14 ms", "optimizer 6.9 GB"],
            },
        ),
        (
            "exchange.md",
            "is planned at 7.51 s instead of 14.8 s a step, since tensor ranks exchange 77 GB instead of 1,314 GB; "
            "Mixtral 8x7B, with 8 large experts, at 6.66 s instead of 6.82 s",
            {
                f"{QWEN} mesh.experts_over_tensor=false": ["step        14.8 s", "tensor 1314.3 GB"],
                f"{QWEN} mesh.experts_over_tensor=true": ["step        7.51 s", "tensor 77.3 GB"],
                f"{MIXTRAL} mesh.experts_over_tensor=false": ["step        6.82 s"],
                f"{MIXTRAL} mesh.experts_over_tensor=true": ["step        6.66 s"],
            },
        ),
    ],
)
def test_plans_are_as_a_page_states(page: str, sentence: str, printed: dict[str, list[str]]) -> None:
    assert sentence in " ".join((ROOT / "docs" / page).read_text().split())
    for settings, pieces in printed.items():
        command = [sys.executable, "-m", "moe_jax.plan", *COMMON.split(), *settings.split()]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for piece in pieces:
            assert piece in found, settings
