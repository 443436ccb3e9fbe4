"""DiffusionNFT: negative-aware fine-tuning on the forward process (arXiv 2509.16117).

Samples come from the snapshot `old`. Two mixtures of the policy's and the old velocity,
v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old - beta v, are matched to the sample, the one weighed by how
good it is, r in [0, 1], the other by 1 - r: what is bad teaches the policy where not to go. At the start the gradient
is the error's times the advantage.
"""

from flowalign.algorithms.matching.negative_aware import NegativeAware


class NFT(NegativeAware):
    """DiffusionNFT: good and bad samples on the forward process, any sampler (arXiv 2509.16117)."""

    name = "nft"
