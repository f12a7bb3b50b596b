"""The engine: requests in, step loop, outputs out."""
