"""EngineLog: writes what a failing engine logs and dumps to a file, which the error then names.

When a step fails, vLLM logs its whole configuration and its scheduler's state: tens of thousands of characters before
the one sentence that matters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from megatron_vcpo.engines.protocol import EngineError

logger = logging.getLogger(__name__)

_LOGGER = "vllm"
_OWN_CONFIG = "VLLM_LOGGING_CONFIG_PATH"  # set by users who direct vLLM's log themselves


def logging_variables() -> dict[str, str]:
    """Environment variables that keep vLLM from printing its log itself."""
    return {} if os.environ.get(_OWN_CONFIG) else {"VLLM_CONFIGURE_LOGGING": "0"}


class EngineLog:
    """Collects what is logged during calls into an engine.

    Args:
        path: file to append to, created at the first write; None for a temporary file. Only the user can read it,
            because a dump contains prompts.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._records = 0  # number of records of the current call
        self._lost: OSError | None = None
        self._handler = _Handler(self)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Within this context, records go to the file. An EngineError raised in it names the file, which also gets its
        traceback.

        Enter it before the engine's turn, which drops all warnings, including this context's own.
        """
        self._records, self._lost = 0, None
        try:
            with self._attached():
                yield
        except EngineError as error:
            if error.__cause__ is not None:
                self.write("".join(traceback.format_exception(error.__cause__)))
            elif not self._records:
                raise
            raise EngineError(f"{str(error).rstrip('.')}. {self._where()}") from error.__cause__
        if self._records:
            logger.warning(f"vLLM logged an error and went on. {self._where()}")

    def note(self, text: str) -> None:
        """Log `text` as an error record."""
        self._records += 1
        self.write(text)

    def write(self, text: str) -> None:
        """Append to the file. If that fails, only the engine's error says so, because that error matters more."""
        try:
            with open(self._open(), "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
        except OSError as error:
            self._lost = error

    def _open(self) -> int:
        if self._path is None:
            descriptor, self._path = tempfile.mkstemp(prefix="megatron_vcpo_engine_", suffix=".log")
            return descriptor
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _where(self) -> str:
        if self._lost is not None:
            return (
                f"What it logged could not be written to {self._path or tempfile.gettempdir()} ({self._lost.strerror})."
            )
        return f"What it logged is in {self._path}."

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        theirs = logging.getLogger(_LOGGER)
        if os.environ.get(_OWN_CONFIG):
            theirs.addHandler(self._handler)
            try:
                yield
            finally:
                theirs.removeHandler(self._handler)
            return
        handlers, propagate = theirs.handlers, theirs.propagate
        theirs.handlers, theirs.propagate = [self._handler], False
        try:
            yield
        finally:
            theirs.handlers, theirs.propagate = handlers, propagate


class _Handler(logging.Handler):
    def __init__(self, log: EngineLog) -> None:
        super().__init__(logging.ERROR)
        self._log = log
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s:%(lineno)d %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.note(self.format(record))


def size_of(path: str | None) -> int:
    """Current size of a log in bytes; 0 if there is none."""
    return os.path.getsize(path) if path is not None and os.path.exists(path) else 0


def grown(path: str | None, since: int) -> str:
    """A space and a sentence that names the log if it has grown beyond `since` bytes; otherwise ''."""
    return f" What it logged is in {path}." if size_of(path) > since else ""
