"""Kernels: tensors or pointers in, tensors or pointers out. Nothing of ours is imported here."""
