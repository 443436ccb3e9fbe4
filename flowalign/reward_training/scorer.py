"""Training a reward on preferences: Bradley and Terry's model on a CLIP, as PickScore was made (arXiv 2305.01569)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel

from flowalign.core.step_losses import preference_loss
from flowalign.data import Preferences
from flowalign.errors import ConfigError, FlowalignError
from flowalign.reward_training.supervised import LOWER, fit, new_folder
from rewards.clip import picture_settings
from rewards.hub import hub
from rewards.pictures import read_picture
from rewards.vision import pick_device


class PreferenceModel:
    """A model in training on preferences.

    Args:
        model: folder or hub name.
        network: transformers' class of the model.
        processors: tokenizers and processors that are saved with it: each a class, and its folder or hub name.
    """

    def __init__(
        self, model: str, network: PreTrainedModel, processors: Sequence[tuple[Any, str]], device: str
    ) -> None:
        try:
            self.network = network.from_pretrained(**hub(model), dtype=torch.float32).to(pick_device(device)).eval()
            self.processors = [kind.from_pretrained(**hub(path)) for kind, path in processors]
        except (OSError, ValueError) as error:
            raise ConfigError(f"no model to train at '{model}': {' '.join(str(error).split())[:300]}") from error

    def margins(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        """Margins [O, N] of the chosen over the rejected pictures of N pairs, in O orders."""
        raise NotImplementedError

    def losses(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        """Losses [N] of pairs; here Bradley and Terry's, the mean over the orders."""
        return preference_loss(self.margins(pairs, rows)).mean(0)

    def report(self, pairs: Preferences, batch_size: int) -> dict[str, float]:
        """Further figures of held-out pairs."""
        return {}

    @torch.no_grad()
    def accuracy(self, pairs: Preferences, batch_size: int) -> float:
        """Share of the pairs whose chosen picture wins, over all orders; a tie counts half.

        Raises:
            FlowalignError: a score is infinite or NaN.
        """
        batches = torch.arange(len(pairs)).split(batch_size)
        margin = torch.cat([self.margins(pairs, rows.tolist()).sum(0) for rows in batches])
        if not margin.isfinite().all():
            raise FlowalignError(f"scores of the held-out pairs are not finite; after training {LOWER}")
        return ((margin > 0).float() + (margin == 0) / 2).mean().item()

    def save(self, folder: Path) -> None:
        """Write the files that the reward loads."""
        for component in (self.network, *self.processors):
            component.save_pretrained(folder)


class ClipScorer(PreferenceModel):
    """A CLIP-like model, for `pick_score`: scores are the cosine of picture and prompt times its scale.

    Args:
        model: folder or hub name; its tokenizer and picture settings must be with it, or with `processor`.
    """

    def __init__(self, model: str, processor: str | None = None, device: str = "auto") -> None:
        source = processor or model
        super().__init__(model, AutoModel, [(AutoTokenizer, source), (AutoImageProcessor, source)], device)
        if not hasattr(self.network, "get_image_features") or not hasattr(self.network, "logit_scale"):
            raise ConfigError(f"'{model}' is a {type(self.network).__name__}; a CLIP-like dual encoder can be trained")
        self.tokenizer, pictures = self.processors
        self.preprocess = picture_settings(pictures)

    def scores(self, files: Sequence[str | Path], texts: Sequence[str]) -> Tensor:
        """Scores [N] of pictures with their prompts."""
        device = self.network.device
        pixels = self.preprocess.images([read_picture(file) for file in files]).to(device)
        # a text that comes more than once is encoded once
        distinct = list(dict.fromkeys(texts))
        tokens = self.tokenizer(
            distinct,
            padding=True,
            truncation=True,
            max_length=self.network.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(device)
        image = F.normalize(self.network.get_image_features(pixels).pooler_output, dim=-1)
        text = F.normalize(self.network.get_text_features(**tokens).pooler_output, dim=-1)
        text = text[[distinct.index(prompt) for prompt in texts]]
        scores: Tensor = self.network.logit_scale.exp() * (image * text).sum(-1)
        return scores

    def margins(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        files = [pairs.metadata[i][key] for key in ("chosen", "rejected") for i in rows]
        chosen, rejected = self.scores(files, [pairs.texts[i] for i in rows] * 2).chunk(2)
        return (chosen - rejected)[None]


def split(pairs: Preferences, share: float, seed: int) -> tuple[Preferences, Preferences]:
    """Split pairs by prompt into those to train on and held-out ones, which have about `share` of the prompts."""
    prompts = sorted(set(pairs.texts))
    np.random.default_rng(seed).shuffle(prompts)
    aside = set(prompts[: max(1, round(share * len(prompts)))])
    if len(aside) == len(prompts):
        raise ConfigError("all preferences are for one prompt; give others to judge by with --heldout FILE")
    train, heldout = ([i for i, text in enumerate(pairs.texts) if (text in aside) == out] for out in (False, True))
    return pairs.take(train), pairs.take(heldout)


def train_reward(
    model: PreferenceModel,
    pairs: Preferences,
    heldout: Preferences,
    output: Path,
    epochs: int = 3,
    learning_rate: float = 3e-6,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Fine-tune a model (a CLIP with all its weights), and write it to a folder that appears when it is whole.

    Args:
        learning_rate: first learning rate of AdamW; it falls linearly to 0. PickScore's is 3e-6.

    Returns:
        the content of the folder's reward.json: the settings, and the accuracy on the held-out pairs before and after.
    """
    torch.manual_seed(seed)

    def losses(rows: Tensor) -> Tensor:
        return model.losses(pairs, rows.tolist())

    before = model.accuracy(heldout, batch_size)
    settings: dict[str, Any] = {"epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size}
    parameters = {name: p for name, p in model.network.named_parameters() if p.requires_grad}
    rows = torch.arange(len(pairs))
    fit(parameters, losses, rows, **settings, weight_decay=0.01, progress=progress)
    report = {
        "pairs": len(pairs),
        "heldout_pairs": len(heldout),
        "heldout_accuracy_before": before,
        "heldout_accuracy_after": model.accuracy(heldout, batch_size),
        **model.report(heldout, batch_size),
        **settings,
        "seed": seed,
    }
    with new_folder(output, "reward.json", report) as folder:
        model.save(folder)
    return report
