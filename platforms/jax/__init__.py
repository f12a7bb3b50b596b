"""What the platforms driven by JAX share: finding devices, opening them by id, and their emulation."""
