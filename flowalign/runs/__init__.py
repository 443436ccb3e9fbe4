"""The format of a run's folder: files, metrics, checkpoints, samples."""
