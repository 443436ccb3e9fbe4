"""What helps around training: dry runs, leagues, random models."""
