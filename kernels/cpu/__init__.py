"""C++ kernels for CPUs behind one nanobind module."""
