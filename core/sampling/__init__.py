"""From logits to token ids: parameters, masks, penalties, noise."""
