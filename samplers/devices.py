"""What kind of device tensors are on."""

import torch


def is_gpu(device: torch.device | str) -> bool:
    """Whether a device is an accelerator of any maker with memory beside the host's; Apple's shares the host's."""
    return torch.device(device).type not in ("cpu", "mps", "meta")
