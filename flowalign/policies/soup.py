"""Soups: one LoRA that changes the weights by a weighted sum of what several change (arXiv 2306.04488, section 2.2).

A LoRA of rank r changes a weight by scale * B A. The sum of share_i * scale_i * B_i A_i is a LoRA of rank sum of r_i,
exactly: A has the rows of all A_i, and B the columns of all share_i * scale_i * B_i.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from flowalign.errors import ConfigError
from flowalign.policies.base import TRAINED, Policy, fitting_lora


class Soup:
    """Several LoRAs on one policy, which is given their weighted sums in turn as its trained LoRA.

    Args:
        policy: policy of the model that all LoRAs were trained on; a LoRA of its own is taken off.
        paths: folder of each LoRA.

    Raises:
        ConfigError: a LoRA does not fit the model, or the model is of two networks.
    """

    def __init__(self, policy: Policy[Any], paths: Sequence[Path]) -> None:
        if len(getattr(policy, "networks", [None])) > 1:
            raise ConfigError("a soup is of LoRAs of one network, and this model has two")
        self.policy = policy
        self.names = [f"soup{i}" for i in range(len(paths))]
        self._take_off()
        for name, path in zip(self.names, paths, strict=True):
            with fitting_lora("soup", path):
                policy.read_lora(path, name)
        modules = policy.network.named_modules()
        self.layers = {name: layer for name, layer in modules if isinstance(layer, LoraLayer)}
        for layer in self.layers.values():
            kinds = {type(layer.lora_A[name]) for name in self.names if name in layer.lora_A}
            if not kinds <= {nn.Linear, nn.Conv2d} or layer.lora_magnitude_vector:
                raise ConfigError("a soup is of plain LoRAs of linear layers and convolutions")

    def serve(self, shares: Sequence[float]) -> None:
        """Make the weighted sum the policy's trained LoRA."""
        rank = sum(self.policy.network.peft_config[name].r for name in self.names)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(self.layers))
        with warnings.catch_warnings():
            # peft's, of the other adapters that are there
            warnings.simplefilter("ignore", UserWarning)
            self._take_off()
            self.policy.network.add_adapter(config, TRAINED)
        with torch.no_grad():
            for layer in self.layers.values():
                down, up = layer.lora_A[TRAINED].weight.zero_(), layer.lora_B[TRAINED].weight.zero_()
                first = 0
                for name, share in zip(self.names, shares, strict=True):
                    if name in layer.lora_A:
                        rows = slice(first, first + layer.r[name])
                        down[rows] = layer.lora_A[name].weight
                        up[:, rows] = share * layer.scaling[name] * layer.lora_B[name].weight
                        first = rows.stop
        self.policy.network.set_adapter(TRAINED)
        self.policy.lora, self.policy.lora_config = True, config

    def save(self, folder: Path, shares: Sequence[float]) -> None:
        """Write the LoRA of these shares as a run's LoRA is written."""
        self.serve(shares)
        self.policy.save(folder)

    def _take_off(self) -> None:
        """Remove the trained LoRA."""
        network = self.policy.network
        if TRAINED in getattr(network, "peft_config", {}):
            # transformers and diffusers have each their own name for it
            remove = network.delete_adapters if hasattr(network, "delete_adapters") else network.delete_adapter
            remove(TRAINED)
        self.policy.__dict__.pop("_adapted", None)


def simplex(members: int, steps: int) -> list[list[float]]:
    """All shares of so many members in multiples of 1 / steps that add up to 1, the first member's from 1 to 0."""
    if members == 1:
        return [[1.0]]
    rows = []
    for first in range(steps, -1, -1):
        left = steps - first
        rest = simplex(members - 1, left) if left else [[0.0] * (members - 1)]
        rows += [[first / steps, *(left / steps * share for share in shares)] for shares in rest]
    return rows


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Numbers of the points that no other one dominates: at least as high in all, and higher in one."""
    return [
        i
        for i, own in enumerate(points)
        if not any(
            all(a >= b for a, b in zip(other, own, strict=True)) and list(other) != list(own) for other in points
        )
    ]
