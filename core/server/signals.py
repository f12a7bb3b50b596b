"""The signals that end what serves or answers."""

import signal


def heeded() -> list[signal.Signals]:
    """Those that ask to end, less what whoever started us wants ignored, as nohup does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
