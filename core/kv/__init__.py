"""The KV cache's bookkeeping: block pools, prefix cache, block tables. No device memory is touched here."""
