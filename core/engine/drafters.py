"""Finding the drafter that a setting names."""

from ..config import parse_speculative
from ..errors import ConfigError, PluginError
from ..plugin_loader import Plugins
from ..runner.drafts import Drafter
from ..suggest import did_you_mean


def find_drafter(plugins: Plugins, speculative: str) -> Drafter | None:
    """The drafter of a `speculative` setting, None for none. Raises ConfigError if no plugin brings it and
    PluginError if it cannot be made."""
    name, _ = parse_speculative(speculative)
    if not name:
        return None
    found = plugins.factories("headrace_drafters")
    if name not in found:
        raise ConfigError(
            f"no plugin brings a drafter {name!r}{did_you_mean(name, found)}; known: none, {', '.join(found)}",
            remedies=["--speculative ngram"],
        )
    plugin, factory = found[name]
    try:
        drafter: Drafter = factory()
    except Exception as error:
        raise PluginError(f"the drafter {name!r} cannot be made: {error!r}", plugin=str(plugin)) from error
    return drafter
