"""Training reward models of texts on preferences and ratings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowalign.core.step_losses import preference_loss
from flowalign.data import Preferences
from flowalign.errors import ConfigError
from flowalign.reward_training.scorer import PreferenceModel
from rewards.text.reward_model import RewardModel
from rewards.text.scored import preferred, shown

CENTRED = 0.01
"""Weight of the scores' squared sum in `centred` (TRL's center_rewards_coefficient as its authors set it)."""


def strength(record: dict[str, Any], place: str) -> float:
    """How much better a pair's chosen text is, in the record's own units.

    Raises:
        ConfigError: the record does not say.
    """
    value = record.get("strength")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{place}: no number under 'strength' that says how much better the chosen text is")
    return float(value)


def rating(record: dict[str, Any], key: str, place: str) -> float:
    """A text's rating; raises ConfigError where there is none."""
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{place}: no number under '{key}' that rates a text")
    return float(value)


def bradley_terry(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """-log sigmoid(difference) (arXiv 2203.02155; TRL's RewardTrainer)."""
    return preference_loss(chosen - rejected)


def centred(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """Bradley-Terry plus a small weight times the squared sum of both scores, which keeps them around 0 (arXiv
    2312.09244; TRL's center_rewards_coefficient)."""
    return preference_loss(chosen - rejected) + CENTRED * (chosen + rejected) ** 2


def margin(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """-log sigmoid(difference - strength): clear pairs must differ by more (Llama 2, arXiv 2307.09288; the adaptive
    margin of arXiv 2401.06080)."""
    return preference_loss(chosen - rejected - _strengths(chosen, records))


def scaled(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """-strength log sigmoid(difference): a clear pair counts several times (HelpSteer2-Preference, arXiv
    2410.01257)."""
    return _strengths(chosen, records) * preference_loss(chosen - rejected)


def soft(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """Cross-entropy with the probability sigmoid(strength) that the label is right (arXiv 2401.06080's soft labels)."""
    right = _strengths(chosen, records).sigmoid()
    return right * preference_loss(chosen - rejected) + (1 - right) * preference_loss(rejected - chosen)


def regression(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """Squared errors of both texts' ratings, `chosen_rating` and `rejected_rating` (HelpSteer2, arXiv 2406.08673)."""
    return sum(
        (
            F.mse_loss(
                score,
                score.new_tensor([rating(r, f"{side}_rating", f"pair {i + 1}") for i, r in enumerate(records)]),
                reduction="none",
            )
            for score, side in ((chosen, "chosen"), (rejected, "rejected"))
        ),
        torch.zeros_like(chosen),
    )


def helpsteer(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """Scaled Bradley-Terry plus the squared errors of the ratings. HelpSteer2-Preference (arXiv 2410.01257) does the
    one
    after the other: `--loss regression`, then `--loss scaled --model` on the result."""
    return scaled(chosen, rejected, records) + regression(chosen, rejected, records)


def general(chosen: Tensor, rejected: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    """-log sigmoid(v_chosen^T R v_rejected) of embeddings (GPM, arXiv 2410.02197)."""
    return preference_loss(preferred(chosen, rejected))


Loss = Callable[[Tensor, Tensor, Sequence[dict[str, Any]]], Tensor]
LOSSES: dict[str, Loss] = {
    "bradley_terry": bradley_terry,
    "centred": centred,
    "margin": margin,
    "scaled": scaled,
    "soft": soft,
    "regression": regression,
    "helpsteer": helpsteer,
    "general": general,
}
"""Losses [N] of pairs, from the scores [N] of the chosen and the rejected texts ('general': [N, 2 K]) and the
records."""


def _strengths(like: Tensor, records: Sequence[dict[str, Any]]) -> Tensor:
    return like.new_tensor([strength(record, f"pair {i + 1} of a batch") for i, record in enumerate(records)])


class TextScorer(PreferenceModel):
    """A reward model of texts in training, for `text_score`; with the loss 'general' for `text_preference`.

    Args:
        model: folder or hub name of any model of texts; what is no reward model gets a new head.
        loss: name in `LOSSES`.
        reference: key of the preferences with a reference text (POLAR).
        size: numbers of an embedding with 'general'.
    """

    def __init__(
        self,
        model: str,
        loss: str = "bradley_terry",
        reference: str | None = None,
        size: int = 8,
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        if loss not in LOSSES:
            raise ConfigError(f"--loss: '{loss}' is not of {', '.join(LOSSES)}")
        torch.manual_seed(seed)
        try:
            self.model = RewardModel.load(model, device=device, outputs=size if loss == "general" else 1)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.network, self.loss, self.reference = self.model.network, loss, reference

    def sides(self, pairs: Preferences, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs of the chosen and of the rejected texts, [N], or [N, 2 K] with 'general'."""
        texts = [str(pairs.metadata[i][key]) for key in ("chosen", "rejected") for i in rows]
        references = None
        if self.reference is not None:
            references = [self._reference(pairs.metadata[i], i) for i in rows] * 2
        pictures = shown([pairs.metadata[i] for i in rows]) * 2 if self.model.sees_pictures else None
        outputs = self.model.outputs(texts, [pairs.texts[i] for i in rows] * 2, references, pictures)
        chosen, rejected = (outputs if self.loss == "general" else outputs[:, 0]).chunk(2)
        return chosen, rejected

    def losses(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        return LOSSES[self.loss](*self.sides(pairs, rows), [pairs.metadata[i] for i in rows])

    def margins(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        chosen, rejected = self.sides(pairs, rows)
        return (preferred(chosen, rejected) if self.loss == "general" else chosen - rejected)[None]

    @torch.no_grad()
    def report(self, pairs: Preferences, batch_size: int) -> dict[str, float]:
        """The calibration error on held-out pairs, which tells a reward's use in RL beside its accuracy (SWE-RM)."""
        batches = torch.arange(len(pairs)).split(batch_size)
        margin = torch.cat([self.margins(pairs, rows.tolist())[0] for rows in batches])
        return {"heldout_calibration_error": calibration_error(margin)}

    def save(self, folder: Path) -> None:
        self.model.save(folder)

    def _reference(self, record: dict[str, Any], row: int) -> str:
        if self.reference not in record:
            raise ConfigError(f"preference {row + 1}: no reference text under '{self.reference}'")
        return str(record[self.reference])


def calibration_error(margin: Tensor, bins: int = 10) -> float:
    """Expected calibration error of a pair's probability that the winner by the scores is the chosen text.

    Args:
        margin: [N] log-odds of the chosen texts.
    """
    sure = margin.abs().sigmoid()
    right = (margin > 0).float() + (margin == 0) / 2
    # probabilities of winners are from 1/2 to 1
    place = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    error = 0.0
    for number in place.unique().tolist():
        rows = place == number
        error += rows.float().mean().item() * abs(sure[rows].mean().item() - right[rows].mean().item())
    return error


@torch.no_grad()
def label_strengths(models: Sequence[str], pairs: Preferences, batch_size: int = 32, device: str = "auto") -> None:
    """Write into each pair's record the mean difference of several reward models' scores, `strength`, and its deviation
    (Secrets of RLHF II, arXiv 2401.06080, eq. 2 and 3); pairs that it is below 0 of are probably the wrong way
    round."""
    columns = []
    for path in models:
        model = TextScorer(path, device=device)
        batches = torch.arange(len(pairs)).split(batch_size)
        columns.append(torch.cat([model.margins(pairs, rows.tolist())[0].cpu() for rows in batches]))
    table = torch.stack(columns)
    for record, mean, deviation in zip(pairs.metadata, table.mean(0), table.std(0, correction=0), strict=True):
        record["strength"], record["strength_deviation"] = mean.item(), deviation.item()


def flipped(pairs: Preferences, below: float | None, drop: float | None) -> Preferences:
    """Pairs with the sides of those turned whose strength is below one bound, without those below another in size."""
    texts, records = [], []
    for i, (text, record) in enumerate(zip(pairs.texts, pairs.metadata, strict=True)):
        how = strength(record, f"preference {i + 1}")
        if drop is not None and abs(how) < drop:
            continue
        if below is not None and how < below:
            turned = {"chosen": record["rejected"], "rejected": record["chosen"], "strength": -how}
            record = record | turned
        texts.append(text)
        records.append(record)
    if not texts:
        raise ConfigError("no preference is left; a smaller --drop-below keeps more")
    return Preferences(texts, records)
