"""Policy gradients over recorded denoising steps: one short file a method."""
