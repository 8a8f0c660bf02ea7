"""python -m tests.oracle.steep_loss_scale BITS MODULE <flags>: a program of the package under FP16 whose loss scale
falls by BITS powers of two at each overflow.

Megatron's falls by one, and so comes to rest within a factor of two of an overflow: which step is the last to overflow,
and whether a later one does again, is then decided by a processor's rounding. From 2**100, in steps of 100 bits, the
first step overflows by twenty orders of magnitude, and the others are several away from it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any


def main() -> None:
    """Run the module's main() with what is left of the command line."""
    bits, module = int(sys.argv.pop(1)), sys.argv.pop(1)
    from megatron_vcpo.patches import megatron_cpu

    megatron_cpu.install()
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    stock = DynamicGradScaler.__init__

    @functools.wraps(stock)
    def steep(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **{**kwargs, "backoff_factor": 2.0**-bits})

    DynamicGradScaler.__init__ = steep
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
