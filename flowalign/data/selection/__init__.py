"""Which prompts an iteration trains on, and which of its groups are worth keeping; for pictures and texts alike."""
