"""A plugin that reads from address zero while it is imported."""

import ctypes

ctypes.string_at(0)
