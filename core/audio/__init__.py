"""Speech: samples, spectrograms, and how Whisper is asked for text."""
