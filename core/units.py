"""Sizes in bytes, and counts: read from what users write, and written for people."""

import re

from .errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmg])|(\d+)([KMG])", re.ASCII)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, *, name: str = "size") -> int:
    """`"8GiB"`, `"512 MB"` or `"4096"` as bytes. Raises ConfigError that names the setting."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ConfigError(f"{name} must be a size such as 8GiB or 512MiB, got {text!r}")
    return int(float(match[1]) * unit)


def parse_count(text: str) -> int:
    """`"4096"`, or as vLLM reads it: `"8k"` is 8,000, `"8K"` 8,192, and so on with m and g. Raises ValueError."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return int(text)
    if match[3]:
        return int(match[3]) * int(1024 ** ("KMG".index(match[4]) + 1))
    return round(float(match[1]) * float(1000 ** ("kmg".index(match[2]) + 1)))


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that keeps at least one digit before the point: `"15.3 GiB"`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
