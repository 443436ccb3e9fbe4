"""Training a reward on preferences: Bradley and Terry's model on a CLIP, as PickScore was made (arXiv 2305.01569)."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from flowalign.core.losses import preference_loss
from flowalign.data import Preferences
from flowalign.errors import ConfigError
from flowalign.runs.files import sync
from rewards.clip import picture_settings
from rewards.vision import pick_device

if TYPE_CHECKING:
    from flowalign.reward_training.judge import JudgeScorer


class Scorer:
    """A CLIP-like model of transformers in training: scores are the cosine of picture and prompt times its scale.

    Args:
        model: folder or hub name; its tokenizer and picture settings must be with it, or with `processor`.
    """

    def __init__(self, model: str, processor: str | None = None, device: str = "auto") -> None:
        try:
            self.network = AutoModel.from_pretrained(model, dtype=torch.float32).to(pick_device(device))
            self.tokenizer = AutoTokenizer.from_pretrained(processor or model)
            self.pictures = AutoImageProcessor.from_pretrained(processor or model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no model to train at '{model}': {' '.join(str(error).split())}") from error
        if not hasattr(self.network, "get_image_features") or not hasattr(self.network, "logit_scale"):
            raise ConfigError(f"'{model}' is a {type(self.network).__name__}; a CLIP-like dual encoder can be trained")
        self.preprocess = picture_settings(self.pictures)

    def __call__(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        """[N] by how much more the chosen pictures of these pairs score than the rejected ones."""
        device = self.network.device
        files = [pairs.metadata[i][key] for key in ("chosen", "rejected") for i in rows]
        pixels = self.preprocess.images([PIL.Image.open(file) for file in files]).to(device)
        tokens = self.tokenizer(
            [pairs.texts[i] for i in rows],
            padding=True,
            truncation=True,
            max_length=self.network.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(device)
        image = F.normalize(self.network.get_image_features(pixels).pooler_output, dim=-1)
        text = F.normalize(self.network.get_text_features(**tokens).pooler_output, dim=-1)
        chosen, rejected = (self.network.logit_scale.exp() * (side * text).sum(-1) for side in image.chunk(2))
        return chosen - rejected

    @torch.no_grad()
    def accuracy(self, pairs: Preferences, batch_size: int) -> float:
        """Share of the pairs whose chosen picture scores higher, a tie counting half."""
        margin = torch.cat([self(pairs, rows.tolist()) for rows in torch.arange(len(pairs)).split(batch_size)])
        return ((margin > 0).float() + (margin == 0) / 2).mean().item()

    def save(self, folder: Path) -> None:
        """Write what `pick_score` loads."""
        for part in (self.network, self.tokenizer, self.pictures):
            part.save_pretrained(folder)


def split(pairs: Preferences, share: float, seed: int) -> tuple[Preferences, Preferences]:
    """The pairs of most prompts, and those of the other prompts, about `share` of them, to judge by."""
    prompts = sorted(set(pairs.texts))
    np.random.default_rng(seed).shuffle(prompts)
    aside = set(prompts[: max(1, round(share * len(prompts)))])
    if len(aside) == len(prompts):
        raise ConfigError("all preferences are for one prompt; give others to judge by with --heldout FILE")
    kept, held = ([i for i, text in enumerate(pairs.texts) if (text in aside) == held] for held in (False, True))
    return pairs.take(kept), pairs.take(held)


def train_reward(
    scorer: "Scorer | JudgeScorer",
    pairs: Preferences,
    heldout: Preferences,
    output: Path,
    epochs: int = 3,
    learning_rate: float = 3e-6,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Fine-tune every weight of the model, and write it to a folder that appears when it is whole.

    Args:
        learning_rate: of AdamW, falling linearly to 0; PickScore's own is 3e-6.

    Returns:
        what reward.json in the folder holds: the settings, and the accuracy on the held-out pairs before and after.
    """
    torch.manual_seed(seed)
    parameters = list(scorer.network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
    steps = epochs * -(-len(pairs) // batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    before = scorer.accuracy(heldout, batch_size)
    bar = tqdm(total=steps, desc="reward", disable=not progress)
    for _ in range(epochs):
        for rows in torch.randperm(len(pairs)).split(batch_size):
            loss = preference_loss(scorer(pairs, rows.tolist())).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            bar.update()
    bar.close()
    report = {
        "pairs": len(pairs),
        "heldout_pairs": len(heldout),
        "heldout_accuracy_before": before,
        "heldout_accuracy_after": scorer.accuracy(heldout, batch_size),
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "seed": seed,
    }
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    scorer.save(partial)
    (partial / "reward.json").write_text(json.dumps(report, indent=2) + "\n")
    sync(partial)
    os.replace(partial, output)
    return report
