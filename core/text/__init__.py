"""Text to token ids and back: tokenizers, chat templates, incremental detokenization, stop strings."""
