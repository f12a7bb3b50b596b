"""Which request computes which tokens in the next step."""
