"""Formats of quantized checkpoints, one file each, called as config.json's quant_method calls it."""
