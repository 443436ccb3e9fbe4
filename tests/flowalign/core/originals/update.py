"""What both sides of the comparison of a Flow-GRPO update share: the pipeline, prompts, rewards and settings."""

PROMPTS = ["two red circles", "a blue square", "three green triangles"]
MEMBERS = 3
REWARDS = [0.1, 0.9, 0.4, 0.5, 0.5, 0.5, 1.0, 0.2, 0.3]
"""of the members of each prompt in turn; the second prompt's are all alike"""
SIGMAS = [1.0, 0.75, 0.5, 0.25]
GUIDANCE = 4.5
NOISE = 0.7
CLIP = 0.03
BETA = 0.04
RANK = 1
TARGETS = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v"]
"""under `attn`"""
