"""What the package says beside its results: the loggers below `megatron_vcpo`, one for each module, on stderr.

An entry point calls `configure` or `configure_command`; a training loop of your own may do so too, or attach its own
handlers to the logger `megatron_vcpo`. Results, such as an iteration's line, are printed on stdout.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any, Literal, TextIO

LOGGER = "megatron_vcpo"
Level = Literal["debug", "info", "warning", "error"]


def configure(*, rank: int, level: Level | int = "info") -> None:
    """Write the package's records to stderr, as `megatron_vcpo: <sentence>`. Idempotent: the last call counts.

    Other packages' loggers, the root's included, stay as they are.

    Args:
        rank: of this process; shown, as `megatron_vcpo: [rank 3] <sentence>`, where it is not the first one's, and in
            records of level DEBUG, which come from every rank and show the time too.
        level: the least that is shown.
    """
    _install(_RankFormatter(), rank=rank, level=level)


def configure_command(name: str) -> None:
    """The same for a command-line tool: progress as it is, warnings and errors as `<name>: <sentence>`."""
    _install(_CommandFormatter(name), rank=0, level="info")


def log_single_rank(logger: logging.Logger, level: int, sentence: str, *args: Any) -> None:
    """Log on the first rank alone what every rank comes to know, as Megatron's function of this name does.

    That one is Megatron's, and asks torch.distributed: it cannot be called before either is there.
    """
    if _rank() == 0:
        logger.log(level, sentence, *args, stacklevel=2)


def quiet_libraries(*, offline: bool = False) -> None:
    """Hide other packages' remarks that a person can do nothing about; call it before they are imported.

    Args:
        offline: in a tool without a training run: also those about kernels that it does not use, and about running as
            a single process.
    """
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    if offline:
        warnings.filterwarnings(
            "ignore", category=UserWarning, module=r"megatron\.|modelopt\.|torch\.distributed\.checkpoint"
        )
        for name in ("megatron", "torch.utils.cpp_extension"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return
    # A dozen times at import; where they are needed, Megatron and the dry run say so.
    warnings.filterwarnings("ignore", message=".*([Tt]ransformer.[Ee]ngine|Apex)")
    warnings.filterwarnings("ignore", message="transformers .* is not tested with current version of modelopt")


def _install(formatter: logging.Formatter, *, rank: int, level: Level | int) -> None:
    logger = logging.getLogger(LOGGER)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _StderrHandler)]:
        logger.removeHandler(handler)
    handler = _StderrHandler(rank)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.setLevel(level if isinstance(level, int) else level.upper())
    logger.propagate = False  # megatron.training gives the root a handler of its own, which would say all twice


def _rank() -> int:
    """As configured, otherwise as torchrun says."""
    handlers = logging.getLogger(LOGGER).handlers
    configured = next((handler.rank for handler in handlers if isinstance(handler, _StderrHandler)), None)
    return int(os.environ.get("RANK", "0")) if configured is None else configured


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is when a record comes, and notes the rank in the record."""

    def __init__(self, rank: int) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would keep the stream of this moment
        self.rank = rank

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # an attribute there
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        record.rank = self.rank
        return super().filter(record)


class _RankFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(f"{LOGGER}: %(message)s")
        self._ranked = logging.Formatter(f"{LOGGER}: [rank %(rank)d] %(message)s")
        self._debug = logging.Formatter(f"{LOGGER}: [rank %(rank)d] %(asctime)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno <= logging.DEBUG:
            return self._debug.format(record)
        return self._ranked.format(record) if record.rank else super().format(record)  # type: ignore[attr-defined]


class _CommandFormatter(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__("%(message)s")
        self._named = logging.Formatter(f"{name}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.levelno < logging.WARNING else self._named.format(record)
