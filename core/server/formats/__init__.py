"""Tool-call and reasoning formats as data: what models write, read back as content, reasoning and calls."""
