"""GPU kernels, one Triton source for every vendor. What differs between GPUs is data, in tuning.py.

Elementwise arithmetic is in float32 only; tl.dot takes the model's dtype, or float32 where the tuning says so.
"""
