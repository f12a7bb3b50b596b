"""What the GPU platforms share: a torch device, and Triton's kernels as an op provider."""
