"""The profile of tests/conftest.py holds for every property test."""

import re
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent


def test_a_slow_machine_fails_no_property_test():
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
    own = re.compile(r"@settings\([^)]*(deadline|suppress_health_check)|load_profile\(")
    elsewhere = [path for path in TESTS.rglob("*.py") if own.search(path.read_text())]
    assert elsewhere == [TESTS / "conftest.py"]
