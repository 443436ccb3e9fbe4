"""What turns a model into trajectories of actions with log-probabilities."""
