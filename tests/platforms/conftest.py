"""What tests of platforms share."""

import pytest

from headrace.core.plugin_loader import Plugins, load_plugins


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()
