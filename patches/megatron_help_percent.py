"""`--help` of Megatron's parser fails with "unsupported format character": some help texts have a bare percent sign.

Versions: megatron-core 0.19.2 (Python's argparse formats help texts with %).
No longer needed when `tests/launch/test_flags.py::test_megatron_help_still_holds_a_bare_percent_sign` fails.
"""

from __future__ import annotations

import argparse


def broken_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Actions whose help text cannot be formatted."""
    broken = []
    for action in parser._actions:
        try:
            parser._get_formatter()._expand_help(action) if action.help else None
        except (ValueError, TypeError, KeyError):
            broken.append(action)
    return broken


def apply(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs in the help texts of `broken_actions`."""
    for action in broken_actions(parser):
        action.help = str(action.help).replace("%", "%%")
