"""VQAScore with the model of its authors, CLIP-FlanT5 (arXiv 2404.01291): a CLIP's patches, projected, stand before the
question that a T5 reads; the score is how probable the answer Yes is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Spec
from rewards.clip import picture_settings
from rewards.hub import hub
from rewards.vision import Dtype, ModelReward, load_repository, pick_device, without_prefix
from rewards.wording import WORDINGS, named_texts

IMAGE = "<image>"
SEEN = -2  # of the CLIP's layers, the one before the last


class ClipT5(nn.Module):
    """The networks of CLIP-FlanT5.

    Args:
        config, tensors: of the published checkpoint.
        tower: folder or hub name of the CLIP, whose weights are taken where the checkpoint has none of its own.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], tower: str, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, CLIPVisionModel, T5Config, T5ForConditionalGeneration

        super().__init__()
        tower_weights = without_prefix(tensors, "vision_tower.vision_tower.vision_model.")
        config_of = AutoConfig.from_pretrained(**hub(tower)).vision_config if tower_weights else None
        given = {"pretrained_model_name_or_path": None, "config": config_of, "state_dict": tower_weights}
        self.vision = CLIPVisionModel.from_pretrained(**(given if tower_weights else hub(tower)), dtype=dtype)
        projector = without_prefix(tensors, "mm_projector.")
        inside, outside = self.vision.config.hidden_size, config["d_model"]
        self.projector = nn.Sequential(nn.Linear(inside, outside), nn.GELU(), nn.Linear(outside, outside)).to(dtype)
        self.projector.load_state_dict(projector)
        text = {
            n: t for n, t in tensors.items() if not n.startswith(("vision_tower.", "mm_projector.", "embed_tokens."))
        }
        self.text, report = T5ForConditionalGeneration.from_pretrained(
            None, config=T5Config(**config), state_dict=text, dtype=dtype, output_loading_info=True
        )
        if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
            raise ValueError(f"these are not CLIP-FlanT5's weights: {len(wrong)} tensors differ, e.g. {wrong[0]}")

    def forward(self, pixels: Tensor, before: Tensor, after: Tensor, mask: Tensor, answer: Tensor) -> Tensor:
        """[B] mean log-probability of the answer's tokens.

        Args:
            pixels: [B, 3, H, W] preprocessed.
            before: [L1] tokens before the picture.
            after, mask: [B, L2] tokens after it, padded on the right.
            answer: [L3] tokens, with the end.
        """
        seen = self.vision(pixels, output_hidden_states=True).hidden_states[SEEN][:, 1:]
        embed = self.text.get_input_embeddings()
        embeddings = [embed(before).expand(len(pixels), -1, -1), self.projector(seen), embed(after)]
        begun = F.pad(answer[:-1], (1, 0), value=self.text.config.decoder_start_token_id)
        ones = mask.new_ones(len(pixels), embeddings[0].shape[1] + embeddings[1].shape[1])
        logits = self.text(
            inputs_embeds=torch.cat(embeddings, dim=1),
            attention_mask=torch.cat([ones, mask], dim=1),
            decoder_input_ids=begun.expand(len(pixels), -1),
        ).logits
        log_probs = logits.float().log_softmax(dim=-1)
        return log_probs.gather(-1, answer.expand(len(pixels), -1)[..., None])[..., 0].mean(dim=-1)


@cache
def load_clip_t5(model: str, tower: str, device: str, dtype: Dtype) -> ClipT5:
    """Load the networks; rewards that name the same ones share them."""
    config, tensors = load_repository(model)
    network = ClipT5(config, tensors, tower, getattr(torch, dtype))
    return network.to(pick_device(device)).eval().requires_grad_(False)


def read_question(place: Path) -> str:
    """The model's question: a text file, or the constants in the authors' folder t2v_metrics, which is not run.

    Raises:
        ValueError: it lacks {prompt} or <image>; one line.
    """
    if place.is_dir():
        try:
            system = named_texts(place / "constants.py")["SYSTEM_MSG"]
            theirs = named_texts(place / "models" / "vqascore_models" / "clip_t5_model.py")
            question = theirs["default_question_template"].replace("{}", "{prompt}")
        except (OSError, KeyError) as error:
            raise ValueError(f"clip_t5: {place} is not the authors' t2v_metrics of before version 3.1") from error
        return f"{system} USER: {IMAGE}\n{question} ASSISTANT: "
    text = place.read_text(encoding="utf-8")
    if text.count(IMAGE) != 1 or "{prompt}" not in text:
        raise ValueError(f"clip_t5: {place} must hold {{prompt}}, and {IMAGE} once")
    return text


class ClipT5Score(ModelReward):
    """VQAScore by CLIP-FlanT5: how probable it is that the picture shows the prompt, in [0, 1] (arXiv 2404.01291).

    As in the authors' code it is the geometric mean of the probabilities of Yes and of the end after it.

    Args:
        question: the model's question: a text file with {prompt} and, once, <image>; or the authors' folder
            t2v_metrics, whose wording the weights were trained on and which their scores need. Default: our words.
        answer: answer whose probability is taken.
        model: folder or hub name of the published checkpoint.
        tower: folder or hub name of its CLIP.
        tokenizer: folder or hub name of its T5's tokenizer.
        batch_size, device, dtype: of the model.
    """

    name = "clip_t5"
    spec = Spec(differentiable=True)

    def __init__(
        self,
        question: str | None = None,
        answer: str = "Yes",
        model: str = "zhiqiulin/clip-flant5-xl",
        tower: str = "openai/clip-vit-large-patch14-336",
        tokenizer: str = "google/flan-t5-xl",
        batch_size: int = 16,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        super().__init__(batch_size)
        self.before, self.after = read_question(Path(question) if question else WORDINGS / "clip_t5.txt").split(IMAGE)
        self.network = load_clip_t5(model, tower, device, dtype)
        self.device, self.dtype = pick_device(device), getattr(torch, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(**hub(tokenizer))
        self.answer = torch.tensor(self.tokenizer(answer).input_ids, device=self.device)
        self.preprocess = replace(picture_settings(AutoImageProcessor.from_pretrained(**hub(tower))), fit="square")

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        # each piece ends with the end of a text, as in training
        before = torch.tensor(self.tokenizer(self.before).input_ids, device=self.device)
        questions = [self.after.replace("{prompt}", prompt) for prompt in prompts]
        after = self.tokenizer(questions, padding=True, padding_side="right", return_tensors="pt").to(self.device)
        log_probs = self.network(pixels, before, after["input_ids"], after["attention_mask"], self.answer)
        return Scores(log_probs.exp())
