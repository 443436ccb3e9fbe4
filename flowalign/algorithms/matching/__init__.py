"""Learning from clean samples on the forward process: one short file a method."""
