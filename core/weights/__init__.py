"""Checkpoint formats: safetensors, GGUF, pickle and dummy weights behind one WeightSource."""
