"""The shapes world's own preference model."""

from pathlib import Path

from rewards.clip import PickScore

TINY_CLIP = Path(__file__).parent / "tiny_clip"


class TinyCLIP(PickScore):
    """The tiny CLIP preference model of the shapes world, trained as scripts/build_tiny_clip.py says.

    Args:
        batch_size, device: of the model.
    """

    name = "tiny_clip"

    def __init__(self, batch_size: int = 64, device: str = "auto") -> None:
        super().__init__(str(TINY_CLIP), None, batch_size, device)
