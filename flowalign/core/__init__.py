"""Arithmetic on actions with log-probabilities: it knows nothing of images, tokens or models.

One record serves denoising steps and tokens alike: B trajectories of T actions,
`log_prob [B, T], mask [B, T], reward [B] or [B, T], group [B] -> advantage [B, T] -> loss`.
"""
