"""One file per Hugging Face model_type: config to ModelSpec, and the names of its weights."""
