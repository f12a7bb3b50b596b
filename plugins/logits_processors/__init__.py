"""Custom logits processors that requests choose by name."""
