"""The first update of Muon, matrix by matrix, in float64. Written from the definition, without the package's code."""

import math
from collections.abc import Sequence

import numpy as np

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ATTENTION = ("query", "key", "value", "out", "query_latent", "kv_latent", "rope_key")
MLP = ("gate", "clipped_gate", "up", "down")
MATRICES = {*ATTENTION, *MLP, "projection"}  # names of what is neither a router's nor a vector


def newton_schulz(x_rc: np.ndarray, steps: int = 5) -> np.ndarray:
    """The matrix with singular values near 1."""
    a, b, c = COEFFICIENTS
    x_rc = x_rc / np.linalg.norm(x_rc)
    for _ in range(steps):
        gram_rr = x_rc @ x_rc.T
        x_rc = a * x_rc + (b * gram_rr + c * gram_rr @ gram_rr) @ x_rc
    return x_rc


def first_update(names: Sequence[str], grad: np.ndarray) -> np.ndarray | None:
    """What Muon subtracts, over the learning rate, from the parameter of a path. None: it is not Muon's.

    Arrays have matrices of several blocks, and of several experts; attention's heads are part of one matrix.
    """
    if names[-1] not in MATRICES or "segments" not in names:
        return None
    stacked = 2 if "experts" in names else 1
    rows = math.prod(grad.shape[stacked:-1]) if names[-1] == "out" else grad.shape[stacked]
    grad_nrc = grad.astype(np.float64).reshape(math.prod(grad.shape[:stacked]), rows, -1)
    found = [np.zeros_like(each) if not each.any() else newton_schulz(each) for each in grad_nrc]
    return 0.2 * math.sqrt(max(grad_nrc.shape[1:])) * np.reshape(found, grad.shape)
