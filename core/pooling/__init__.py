"""Vectors instead of tokens: embeddings, scores of pairs, classes."""
