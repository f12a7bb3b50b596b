"""Everything optional, one folder per kind. Loaded by entry point, never imported."""
