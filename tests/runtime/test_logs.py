"""What the package says on stderr, and that it says it by its loggers."""

from __future__ import annotations

import ast
import io
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest

from megatron_vcpo.runtime import logs, phases

ROOT = Path(__file__).parents[2]
logger = logging.getLogger("megatron_vcpo.flow.loop")

# Files that write to stderr themselves, and how often.
DIRECT = {
    "megatron_vcpo/train.py": 1,  # a signal handler, which may have interrupted a logging call
    "megatron_vcpo/runtime/watchdog.py": 1,  # another thread may be stuck with the handler's lock
    "megatron_vcpo/rollout/rewards/keeper.py": 1,  # a worker's traceback; it imports next to nothing
    "tools/write_flags.py": 1,  # for those who work on the project, as the next one
    "tools/mutate.py": 1,
}


def test_the_first_rank_s_sentences_have_the_package_s_name_alone_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "100% of it")
    assert capsys.readouterr() == ("", "megatron_vcpo: 100% of it\n" * 3)


def test_other_ranks_show_their_number_and_records_carry_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(rank=3)
    seen: list[int] = []
    own = logging.Handler()
    own.emit = lambda record: seen.append(record.rank)  # type: ignore[attr-defined, method-assign]
    logging.getLogger("megatron_vcpo").addHandler(own)
    try:
        logger.warning("rejected %s", "one")
    finally:
        logging.getLogger("megatron_vcpo").removeHandler(own)
    assert capsys.readouterr().err == "megatron_vcpo: [rank 3] rejected one\n"
    assert seen == [3]


def test_debug_shows_rank_and_time_and_leaves_the_other_sentences_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(rank=0, level="debug")
    before = phases.current()
    phases.enter("publish weights", iteration=7)
    logger.info("a response ends")
    phases.enter("start", iteration=before.iteration)
    first, second, _ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"megatron_vcpo: \[rank 0\] \d{4}-\d\d-\d\d [\d:,]+ "
        rf"phase {before.number + 1} of iteration 7: publish weights",
        first,
    )
    assert second == "megatron_vcpo: a response ends"


@pytest.mark.parametrize(("level", "shown"), [("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_is_the_least_that_is_shown(
    capsys: pytest.CaptureFixture[str], level: logs.Level, shown: int
) -> None:
    logs.configure(rank=0, level=level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logger, name)("said")
    assert capsys.readouterr().err.count("said") == shown


def test_configuring_again_replaces_and_says_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(rank=2, level="error")
    logs.configure(rank=1, level="info")
    logs.configure(rank=1, level="info")
    logger.info("once")
    assert capsys.readouterr().err == "megatron_vcpo: [rank 1] once\n"


def test_it_follows_a_replaced_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        logger.info("here")
        assert stream.getvalue() == "megatron_vcpo: here\n"


def test_one_rank_speaks_for_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    for rank in (0, 1):
        logs.configure(rank=rank)
        logs.log_single_rank(logger, logging.INFO, "for %s", "all")
    assert capsys.readouterr().err == "megatron_vcpo: for all\n"


def test_a_command_names_itself_before_what_went_wrong_only(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_command("plot_run")
    logger.info("scoring: one")
    logger.error("no such run.")
    assert capsys.readouterr().err == "scoring: one\nplot_run: no such run.\n"


def test_the_root_logger_and_other_packages_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    others = [logging.getLogger(name) for name in (None, "megatron", "vllm", "transformers")]
    before = [(o.level, list(o.handlers), list(o.filters), o.propagate, o.disabled) for o in others]
    logs.configure(rank=0, level="debug")
    logs.configure_command("plot_run")
    assert [(o.level, list(o.handlers), list(o.filters), o.propagate, o.disabled) for o in others] == before

    logs.configure(rank=0)
    handler = logging.StreamHandler(sys.stderr)  # as importing megatron.training adds one
    logging.getLogger().addHandler(handler)
    try:
        logger.error("said")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err.count("said") == 1


def test_libraries_are_quiet_about_what_nobody_can_change() -> None:
    megatron = [logging.getLogger(name) for name in ("megatron", "torch.utils.cpp_extension")]
    levels = [library.level for library in megatron]
    shown: dict[bool, list[str]] = {}
    for offline in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logs.quiet_libraries(offline=offline)
            warnings.warn("old", FutureWarning, stacklevel=1)
            warnings.warn("older", DeprecationWarning, stacklevel=1)
            warnings.warn("Transformer Engine is not installed", stacklevel=1)
            warnings.warn_explicit("no kernel", UserWarning, "x.py", 1, module="megatron.core.fusions")
            warnings.warn("ours", stacklevel=1)
        shown[offline] = [str(warning.message) for warning in caught]
        if not offline:
            assert [library.level for library in megatron] == levels
    try:
        assert shown == {False: ["no kernel", "ours"], True: ["Transformer Engine is not installed", "ours"]}
        assert [library.level for library in megatron] == [logging.ERROR] * 2
    finally:
        for library, level in zip(megatron, levels, strict=True):
            library.setLevel(level)


def test_nothing_else_writes_to_stderr() -> None:
    found: dict[str, int] = {}
    for folder in ("megatron_vcpo", "patches", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            direct = sum(map(_is_direct, ast.walk(ast.parse(path.read_text()))))
            if direct:
                found[str(path.relative_to(ROOT))] = direct
    assert found == DIRECT


def _is_direct(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    target = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "file"]
    first = ast.unparse(node.args[0]) if node.args else ""
    return (
        (called == "print" and "stderr" in "".join(target))
        or (called == "os.write" and first in ("2", "sys.stderr.fileno()"))
        or called in ("sys.stderr.write", "sys.stderr.writelines", "traceback.print_exc", "traceback.print_exception")
    )
