"""The cpu platform's own program: a model's forward pass traced once and run without an interpreter."""
