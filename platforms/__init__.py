"""Platforms: each supplies devices and the ops that it does better. Loaded by entry point, never imported."""
