"""Kernels that somebody else ships for a platform, one source of kernels a file."""
