"""Names of the experts' grouped products: `train.grouped_product`."""

from typing import NamedTuple

AUTO = "auto"
KERNELS = ("blocks", "ragged", "pallas", "hopper", "blackwell", "megablox", "tokamax")
_JOINED = "+"


class PassKernels(NamedTuple):
    """The kernel of each pass of a grouped product."""

    forward: str
    dgrad: str  # of the gradient of the rows
    wgrad: str  # of the gradient of the weights

    @property
    def name(self) -> str:
        """The value of the setting."""
        return self.forward if len(set(self)) == 1 else _JOINED.join(self)


def passes_of(name: str) -> PassKernels | None:
    """The kernels that a name stands for: one for all passes, or three joined by `+`. None for another name."""
    kernels = name.split(_JOINED)
    if len(kernels) == 1:
        kernels *= 3
    known = len(kernels) == 3 and all(kernel in KERNELS for kernel in kernels)
    return PassKernels(*kernels) if known else None
