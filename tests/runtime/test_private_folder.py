"""Where torch and vLLM keep temporary files and sockets, and who can get at them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from megatron_vcpo.config import ConfigError
from megatron_vcpo.runtime.private_folder import use_private_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_RPC_BASE_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    yield short
    for path in sorted(short.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    short.rmdir()


def test_torch_and_vllm_keep_to_a_folder_of_this_user_alone_whatever_the_umask(temporary: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    assert Path(cache_dir()).parent == temporary  # an import may have asked before
    before = os.umask(0)
    try:
        use_private_folder()
        use_private_folder()
        compiled, socket = Path(cache_dir()), get_open_zmq_ipc_path().removeprefix("ipc://")
    finally:
        os.umask(before)
    private = temporary / f"megatron_vcpo_{os.getuid()}"
    assert compiled == private / "torchinductor"
    assert Path(socket).parent == private
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_closed_and_one_of_another_user_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = temporary / f"megatron_vcpo_{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    use_private_folder()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    stranger = os.getuid() + 1
    private.rename(temporary / f"megatron_vcpo_{stranger}")
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(ConfigError, match=r"was made by another user .* set TMPDIR to a folder of your own"):
        use_private_folder()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_refused(temporary: Path, kind: str) -> None:
    private = temporary / f"megatron_vcpo_{os.getuid()}"
    if kind == "link":
        (temporary / "elsewhere").mkdir()
        private.symlink_to(temporary / "elsewhere")
    else:
        private.write_text("")
    with pytest.raises(ConfigError, match="set TMPDIR to a folder of your own"):
        use_private_folder()


def test_sockets_go_where_their_path_is_short_enough(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    use_private_folder()
    assert os.environ["VLLM_RPC_BASE_PATH"] == f"/tmp/megatron_vcpo_{os.getuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(deep))


def test_what_the_user_has_set_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    use_private_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
