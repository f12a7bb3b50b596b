"""Output that keeps to a grammar: what a request asks for, and the interface to whoever compiles grammars."""
