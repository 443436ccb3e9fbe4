"""Planning of runs: their memory and time, dry runs, and downloads."""
