"""From a plan to device arrays, a forward pass and sampled tokens."""
