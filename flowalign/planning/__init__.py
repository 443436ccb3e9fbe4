"""Before and beside training: how large, how long, whether it runs at all, what must be downloaded."""
