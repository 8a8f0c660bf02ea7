"""Load a function that a flag names by its import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_vcpo.config import ConfigError


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """The function at import path 'module:function'.

    Raises:
        ConfigError: one sentence that names the flag, when the path is malformed, the module cannot be imported, or it
            holds no such callable.
    """
    module_name, separator, name = path.partition(":")
    if not (separator and module_name and name) or module_name.startswith("."):
        raise ConfigError(f"{flag} must be an import path 'module:function', not {path!r}.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        said = error if isinstance(error, (ImportError, SyntaxError)) else f"it raises {type(error).__name__}: {error}"
        raise ConfigError(f"{flag} {path!r}: cannot import {module_name!r} ({said}).") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{flag} {path!r}: the module {module_name!r} has no function {name!r}.")
    return function
