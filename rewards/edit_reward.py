"""EditReward (arXiv 2509.26346): a Qwen2.5-VL reads a picture, its edit and what was asked for, once for each of two
questions; a head of each scores what it makes of a token at the end."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from rewards.base import Metadata, Scores, Spec, reference_images
from rewards.qwen import QwenReward, Reader, ranking_head
from rewards.vision import Dtype, load_weights, pick_device, without_prefix
from rewards.wording import WORDINGS, wording

REWARD_TOKEN = "<|Reward|>"
OURS = WORDINGS / "edit_reward"
THEIRS = {"following": "INSTRUCTION_EDIT_FOLLOWING", "quality": "INSTRUCTION_EDIT_QUALITY"}


@cache
def load_edit_reward(weights: str, base: str, device: str, dtype: Dtype) -> tuple[Reader, nn.ModuleList]:
    """Load network and heads; rewards that name the same ones share them."""
    tensors = load_weights(weights)
    reader = Reader(tensors, base, [REWARD_TOKEN], getattr(torch, dtype), "EditReward")
    heads = nn.ModuleList([ranking_head(reader.width) for _ in THEIRS])
    for number, head in enumerate(heads):
        head.load_state_dict(without_prefix(tensors, f"rm_heads.head_{number}."))
    reader.to(pick_device(device)).eval().requires_grad_(False)
    return reader, heads.to(pick_device(device)).requires_grad_(False)


def read_questions(folder: Path) -> dict[str, str]:
    """The questions: from the authors' folder EditReward/dataset, or one with following.txt and quality.txt."""
    questions = {}
    for name, constant in THEIRS.items():
        files = [folder / f"{name}.txt"]
        if (folder / "prompts.py").is_file():
            files = [folder / "prompts.py", folder / "data_collator_qwen_edit.py"]
        names = (constant, "prompt_with_special_token")
        questions[name] = wording("edit_reward", files, names, "the authors' EditReward/dataset", [REWARD_TOKEN])
    return questions


class EditReward(QwenReward):
    """EditReward: how well a picture was edited, by a Qwen2.5-VL of 7B; the mean of two questions (arXiv 2509.26346).

    Not bounded, better is higher. Parts: `following` (was it done, and nothing else) and `quality` (does it look
    right); `spread`, the mean of the heads' second outputs, the authors' measure of how unsure they are.

    Args:
        instructions: the model's instructions: a folder with following.txt and quality.txt, each with {prompt} and, at
            the end, the token <|Reward|>; or the authors' EditReward/dataset, whose wording the weights were trained
            on and which their scores need. Default: the same criteria in our words.
        weights: a published checkpoint.
        base: folder or hub name of the Qwen2.5-VL below it, for configuration, tokenizer and chat template.
        batch_size, device, dtype: of the model; the heads are float32 always.
    """

    name = "edit_reward"
    spec = Spec(frozenset({"image", "prompt", "reference"}), differentiable=True)

    def __init__(
        self,
        instructions: str | None = None,
        weights: str = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508/model.safetensors",
        base: str = "XiaomiMiMo/MiMo-VL-7B-SFT-2508",
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        super().__init__(batch_size)
        self.questions = read_questions(Path(instructions or OURS))
        self.reader, self.heads = load_edit_reward(weights, base, device, dtype)

    def model_scores(self, pictures: Sequence[Tensor], prompts: Sequence[str], metadata: Metadata) -> Scores:
        sources = self.reader.sized(reference_images(metadata))
        shown = list(zip(sources, pictures, strict=True))
        outputs = []
        for question, head in zip(self.questions.values(), self.heads, strict=True):
            texts = [question.replace("{prompt}", prompt) for prompt in prompts]
            outputs.append(head(self.reader(shown, texts)[:, 0]))
        means, spreads = torch.stack(outputs).unbind(dim=-1)
        aspects = dict(zip(self.questions, means.detach(), strict=True)) | {"spread": spreads.mean(dim=0)}
        return Scores(means.mean(dim=0), aspects)
