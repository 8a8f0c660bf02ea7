"""Keep other packages' warnings out of a converter's output. Call it before they are imported."""

from __future__ import annotations

import logging
import warnings


def be_quiet() -> None:
    """Hide warnings about kernels that a conversion does not use, and about running as a single process."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings(
        "ignore", category=UserWarning, module=r"megatron\.|modelopt\.|torch\.distributed\.checkpoint"
    )
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
