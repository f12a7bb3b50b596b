"""Structured output: libraries that compile grammars into masks of allowed tokens."""
