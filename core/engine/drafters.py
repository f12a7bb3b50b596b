"""Finding the drafter that a setting names."""

from collections.abc import Callable, Mapping

from ..config import parse_speculative
from ..errors import ConfigError, PluginError
from ..platform import Status
from ..plugin_loader import Plugins
from ..runner.drafts import Drafter
from ..suggest import did_you_mean


def find_drafter(plugins: Plugins, speculative: str) -> Drafter | None:
    """The drafter of a `speculative` setting, None for none. Raises ConfigError if no plugin brings it and
    PluginError if it cannot be made."""
    name, _ = parse_speculative(speculative)
    if not name:
        return None
    found: dict[str, tuple[str, Callable[[], Drafter]]] = {}
    for plugin, offer in plugins.ask("headrace_drafters"):
        if not isinstance(offer, Mapping) or not all(callable(factory) for factory in offer.values()):
            plugins.refuse(plugin, Status.BROKEN, "headrace_drafters must return names with factories")
            continue
        found.update({drafter: (str(plugin), factory) for drafter, factory in offer.items()})
    if name not in found:
        raise ConfigError(
            f"no plugin brings a drafter {name!r}{did_you_mean(name, found)}; known: none, {', '.join(found)}",
            remedies=["--speculative ngram"],
        )
    plugin_name, factory = found[name]
    try:
        return factory()
    except Exception as error:
        raise PluginError(f"the drafter {name!r} cannot be made: {error!r}", plugin=plugin_name) from error
