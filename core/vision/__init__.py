"""Images for vision-language models: what users give, pixels by the checkpoint's processor, places in the prompt."""
