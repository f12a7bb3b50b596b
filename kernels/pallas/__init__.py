"""Kernels in Pallas for matrix units that JAX drives. They take JAX arrays and import nothing of ours."""
