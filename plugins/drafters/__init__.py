"""What guesses the next tokens of a text, for a step to verify."""
