"""D3PO: the steps of the better of two pictures are preferred to the worse one's (arXiv 2311.13231).

Rollout: a prompt's pictures from one start noise, with noise at every step. Pairs: in each group the picture of the
highest and of the lowest reward, at every stochastic step; a group of equal rewards has none. Loss: at each step
-log sigmoid of beta times the difference of the two clamped log-ratios to the start weights.

In the authors' script with a reward a prompt has two pictures, and with two members a group the pairs here are theirs.
In their script with people's labels it has seven, and each two with different labels are a pair. Ties (their h = 0)
have a loss of log 2 without a gradient there, and are left out here.
"""

from flowalign.algorithms.trajectory.step_pairs import StepPairs


class D3PO(StepPairs):
    """D3PO: at every step, the best picture of a group is preferred to its worst (arXiv 2311.13231)."""

    name = "d3po"
