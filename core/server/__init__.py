"""The HTTP server: a front that speaks the protocols, and an engine in a process of its own."""
