"""People's votes as a reward during a run: votes are given in the gallery of a run that is still training.

The votes correct a preference model like PickScore. Before every iteration Bradley and Terry's model is fitted to all
votes. Its log-odds are the model's own plus a linear function of features: those of the picture, alone and multiplied
by those of the prompt. A prior keeps the function near 0, so that a few votes change little. On the tiny world the
function alone, from 200 votes, orders 62% of held-out pairs correctly, the model alone 78%, and both 80%.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from flowalign.data.votes import Votes
from flowalign.errors import ConfigError
from rewards.base import Metadata, Scores, Spec
from rewards.clip import PICK_SCORE, PICK_SCORE_PROCESSOR, PickScore
from rewards.pictures import PictureError, read_picture
from rewards.shapes.clip import TINY_CLIP
from rewards.vision import Dtype

REMEMBERED = 200
"""Number of the newest votes over which `foreseen` is computed."""
Vote = tuple[str, str, str, float]
"""A prompt, two pictures' files, and the result: 1 if the second won, 0 if the first did, 0.5 for a tie."""


class LiveVotes(PickScore):
    """PickScore or another preference model, corrected by all votes so far, which are read before every iteration.

    The difference of two pictures' values is the log-odds that people choose the one over the other. Its parts:
    `model`, the value without the votes; `choices`, the number of votes that it has learned; `foreseen`, the share of
    the newest votes that it predicted correctly before it learned them.

    Args:
        votes: the gallery's file of votes, such as runs/one/gallery/votes.sqlite; it need not be there yet.
        model: folder or hub name of a CLIP that was trained on preferences, or 'tiny_clip'.
        processor: folder or hub name of its tokenizer and picture settings, if they are not with the model.
        prior: strength of the prior on the correction: before any vote, a pair's has a variance of 1 / prior.
        batch_size, device, dtype: batch size, device and dtype of the model.
    """

    name = "votes"
    spec = Spec(differentiable=True, deterministic=False, scheduled=True)

    def __init__(
        self,
        votes: str,
        model: str = PICK_SCORE,
        processor: str | None = PICK_SCORE_PROCESSOR,
        prior: float = 2.0,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        if not prior > 0:
            raise ConfigError(f"votes: prior {prior:g} must be above 0")
        if model == "tiny_clip":
            model, processor = str(TINY_CLIP), None
        super().__init__(model, processor, batch_size, device, dtype)
        self.file, self.prior = Path(votes), prior
        self.learned: list[Vote] = []
        self.foreseen: deque[bool] = deque(maxlen=REMEMBERED)
        self.correction: Tensor | None = None
        """[2 D] weights of the features, None without votes."""
        self._seen: dict[tuple[str, str], Tensor] = {}

    def advance(self, progress: float) -> None:
        """Learn the votes that came since the last time."""
        votes = Votes(self.file).of_pictures() if self.file.is_file() else []
        votes = [vote for vote in votes if self._look(vote)]
        if votes == self.learned:
            return
        known = set(self.learned)
        for vote in votes:
            if vote not in known and vote[3] != 0.5:
                self.foreseen.append(bool(self._value(self._difference(vote)) > 0) == (vote[3] == 1))
        self.learned = votes
        self._fit()

    def _look(self, vote: Vote) -> bool:
        """Compute the features of a vote's pictures; False if one of the files is missing."""
        prompt, *files = vote[:3]
        for file in files:
            if (prompt, file) in self._seen:
                continue
            try:
                picture = read_picture(file)
            except PictureError:
                return False
            pixels = self.preprocess.images([picture]).to(self.device, self.dtype)
            with torch.no_grad():
                self._seen[prompt, file] = self._features(pixels, [prompt])[0].cpu()
        return True

    def _features(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """Features [B, 2 D] of preprocessed pictures and their prompts."""
        pictures = self.encoder.images(pixels)
        return torch.cat([pictures, pictures * self.encoder.texts(prompts)], 1)

    def _difference(self, vote: Vote) -> Tensor:
        prompt, first, second, _ = vote
        return self._seen[prompt, second] - self._seen[prompt, first]

    def _model(self, features: Tensor) -> Tensor:
        """The model's own value [...] of features [..., 2 D]: its scale times the cosine."""
        return self.encoder.scale * features.chunk(2, -1)[1].sum(-1)

    def _value(self, features: Tensor) -> Tensor:
        value = self._model(features)
        return value if self.correction is None else value + features @ self.correction.to(features.device)

    def _fit(self) -> None:
        """Fit the most probable correction; the width of its prior follows the size of typical features."""
        if not self.learned:
            self.correction = None
            return
        differences = torch.stack([self._difference(vote) for vote in self.learned])
        x, model_log_odds = differences.double().numpy(), self._model(differences).double().numpy()
        y = np.array([worth for *_, worth in self.learned])
        weight = self.prior * max(float((x**2).sum(1).mean()), 1e-12)

        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            logit = model_log_odds + x @ w
            # 1 / (1 + exp(-logit)), which does not overflow
            odds = (1 + np.tanh(logit / 2)) / 2
            value = np.logaddexp(0, logit).sum() - y @ logit + weight / 2 * w @ w
            return float(value), x.T @ (odds - y) + weight * w

        solution = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B")
        self.correction = torch.from_numpy(solution.x).float()

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        features = self._features(pixels, prompts)
        value = self._value(features)
        share = sum(self.foreseen) / len(self.foreseen) if self.foreseen else torch.nan
        counts = {"choices": float(len(self.learned)), "foreseen": share}
        parts = {name: value.detach().new_full((len(value),), count) for name, count in counts.items()}
        return Scores(value, {"model": self._model(features), **parts})
