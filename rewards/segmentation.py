"""Instances that Mask2Former finds (arXiv 2112.01527), read from its queries as GenEval's official detector does."""

import torch
from torch import Tensor
from torch.nn import functional as F


def instances(
    classes: Tensor, masks: Tensor, padded: tuple[int, int], inner: tuple[int, int], size: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The instances of one picture, as many as there are queries: the likeliest pairs of a query and a class.

    An instance is as sure as its class, times the mean probability of its mask's pixels; its box is its mask's.
    transformers' own post-processing takes masks at 384x384 pixels, whatever the picture's size.

    Args:
        classes: [queries, classes + 1] logits, "nothing" last.
        masks: [queries, h, w] logits.
        padded: height and width of the network's input, `inner` of what the picture became in it, from the left top.
        size: height and width of the picture.

    Returns:
        labels [N], scores [N], boxes [N, 4] (left, top, right, bottom in pixels) and masks [N, height, width].
    """
    probability = classes.softmax(dim=-1)[:, :-1]
    scores, order = probability.flatten().topk(len(classes))
    labels, queries = order % probability.shape[1], order // probability.shape[1]
    logits = F.interpolate(masks[None], padded, mode="bilinear", align_corners=False)[:, :, : inner[0], : inner[1]]
    logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)[0][queries]
    inside = logits > 0
    area = inside.flatten(1).sum(dim=1)
    sure = (logits.sigmoid() * inside).flatten(1).sum(dim=1) / (area + 1e-6)
    boxes = torch.stack([_box(mask) for mask in inside])
    return labels, scores * sure, boxes, inside


def _box(mask: Tensor) -> Tensor:
    """Left, top, right, bottom of a mask [height, width]; 0 where it is empty."""
    rows, columns = mask.any(dim=1).nonzero()[:, 0], mask.any(dim=0).nonzero()[:, 0]
    if not len(rows):
        return torch.zeros(4)
    return torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=torch.float32)
