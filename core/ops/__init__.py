"""The op set: the contract between models and platforms. docs/ops.md lists it.

Each op is declared once, as a function whose body in plain torch *is* its definition. A platform overrides
what it does better; everything else falls back to the definition. Nothing here imports torch until an op runs.
"""

from .table import FAMILIES, OpTable, Selection, op_names, select_ops

__all__ = ["FAMILIES", "OpTable", "Selection", "op_names", "select_ops"]
