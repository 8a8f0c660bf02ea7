"""What an engine logs when it fails: in a file of the user's own, which the error names."""

from __future__ import annotations

import logging
import re
import stat
import tempfile
from pathlib import Path

import pytest

from megatron_vcpo.engines.log import EngineLog, grown, logging_variables, size_of
from megatron_vcpo.engines.process_state import EngineTurn
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.engines.vllm.engine import VLLMEngine

DUMP = "Dumping scheduler output: " + "x" * 50_000


@pytest.fixture
def engine_logger() -> logging.Logger:
    return logging.getLogger("vllm.v1.engine.core")


def fail(log: EngineLog, logger: logging.Logger) -> str:
    """As vLLM does; the error's sentence."""

    def generate() -> None:
        with log.collecting():
            logger.error(DUMP)
            cause = RuntimeError("no \udc80 offset")  # a lone surrogate, as a tokenizer may quote
            raise EngineError("vLLM failed while generating: no offset") from cause

    with pytest.raises(EngineError) as failure:
        generate()
    return str(failure.value)


def test_the_dump_and_the_trace_are_in_the_file_that_the_error_names(tmp_path, engine_logger, capfd):
    parent = logging.getLogger("vllm")
    before = (parent.handlers, parent.propagate)
    path = tmp_path / "run" / "engine_rank3.log"
    log = EngineLog(str(path))
    for times in (1, 2):
        assert fail(log, engine_logger) == f"vLLM failed while generating: no offset. What it logged is in {path}."
        written = path.read_text()
        assert written.count(DUMP) == written.count("RuntimeError: no ") == times
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert capfd.readouterr() == ("", "")
    assert (parent.handlers, parent.propagate) == before


def test_without_a_folder_the_file_is_temporary_and_the_user_s_own(tmp_path, engine_logger, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = EngineLog(None)
    named = re.search(r"is in (\S+)\.$", fail(log, engine_logger))
    assert named is not None
    path = Path(named[1])
    assert path.parent == tmp_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert DUMP in path.read_text()
    assert f"{path}." in fail(log, engine_logger)


def test_an_error_of_our_own_stays_as_it_is(tmp_path):
    with (
        pytest.raises(EngineError, match=r"^Request 0 has no tokens\.$"),
        EngineLog(str(tmp_path / "log")).collecting(),
    ):
        raise EngineError("Request 0 has no tokens.")
    assert not (tmp_path / "log").exists()


def test_an_error_that_the_engine_survives_is_told_in_a_line(tmp_path, engine_logger, capsys):
    log = EngineLog(str(tmp_path / "log"))
    with log.collecting():
        engine_logger.error(DUMP)
    assert capsys.readouterr().err == (
        f"megatron_vcpo: vLLM logged an error and went on. What it logged is in {tmp_path / 'log'}.\n"
    )
    with log.collecting():
        engine_logger.warning("nothing of note")
    assert capsys.readouterr().err == ""


def test_that_line_survives_the_engine_s_turn_which_drops_warnings(tmp_path, engine_logger, capsys):
    engine = object.__new__(VLLMEngine)
    engine._turn, engine._log = EngineTurn({}), EngineLog(str(tmp_path / "log"))
    with engine._calling("vLLM failed"):
        engine_logger.error(DUMP)
        logging.getLogger("megatron_vcpo.engines").warning("within the turn")
    said = capsys.readouterr().err
    assert said.startswith("megatron_vcpo: vLLM logged an error and went on. ")
    assert "within" not in said


def test_a_log_that_cannot_be_written_does_not_hide_the_error(tmp_path, engine_logger):
    (tmp_path / "file").touch()
    said = fail(EngineLog(str(tmp_path / "file" / "log")), engine_logger)
    assert said.startswith("vLLM failed while generating: no offset. What it logged could not be written to ")
    assert "(Not a directory)" in said or "(File exists)" in said


def test_who_configures_vllm_s_logging_keeps_it(tmp_path, engine_logger, monkeypatch):
    assert logging_variables() == {"VLLM_CONFIGURE_LOGGING": "0"}
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "own.json")
    assert logging_variables() == {}
    seen: list[str] = []
    own = logging.Handler()
    own.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("vllm")
    logger.addHandler(own)
    try:
        fail(EngineLog(str(tmp_path / "log")), engine_logger)
        assert seen == [DUMP]
        assert own in logger.handlers
    finally:
        logger.removeHandler(own)
    assert DUMP in (tmp_path / "log").read_text()


def test_a_log_is_named_where_it_grew(tmp_path):
    path = str(tmp_path / "log")
    assert size_of(path) == size_of(None) == 0
    assert grown(path, 0) == grown(None, 0) == ""
    Path(path).write_text("a dump")
    assert grown(path, 0) == f" What it logged is in {path}."
    assert grown(path, size_of(path)) == ""
