"""A folder in the temporary one that only this user can enter, for what torch and vLLM would leave open there.

torch compiles into a folder whose name anyone can guess and make first (torchinductor_<user>), and executes what it
finds in it. vLLM opens sockets whose mode is up to the umask, and passes pickled objects through them.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from megatron_vcpo.config import ConfigError

_SOCKET_NAME = 107 - 37  # bytes: of a socket's path, Linux takes 107, and vLLM appends a slash and 36 characters


def use_private_folder() -> None:
    """Let torch and vLLM keep their temporary files there, also in processes that are started later. Idempotent.

    Raises:
        ConfigError: a folder of that name is there and is not this user's alone.
    """
    folder = _private(Path(tempfile.gettempdir()))
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if not chosen or chosen.startswith(f"{folder.parent}/torchinductor_"):  # torch writes its own default there
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")
    if len(os.fsencode(folder)) > _SOCKET_NAME:
        folder = _private(Path("/tmp"))
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))


def _private(parent: Path) -> Path:
    folder = parent / f"megatron_vcpo_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"{folder} was made by another user (its owner is {found.st_uid}): what is compiled there would be "
                "executed; set TMPDIR to a folder of your own, or have it removed."
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"{folder}, for temporary files, cannot be used ({error.strerror}); set TMPDIR to a folder of your own."
        ) from error
    return folder
