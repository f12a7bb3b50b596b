"""The pytest option --device; pytest reads no conftest.py of a package named by --pyargs before its command line."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --device."""
    parser.addoption("--device", default="reference", help="device under test, as in headrace --device")
