"""What a conformance kit reports. The kit itself is a plugin, reached through the hook headrace_conformance."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. Unsupported is not a failure: the device said so beforehand, and why."""

    name: str
    outcome: Literal["passed", "failed", "unsupported"]
    detail: str = ""
