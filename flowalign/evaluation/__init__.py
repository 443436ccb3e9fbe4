"""How good a model is: scores of held-out prompts, comparisons, the watch on reward hacking, benchmarks."""
