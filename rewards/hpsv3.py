"""HPSv3 (arXiv 2508.03789) and HPSv3++ (2606.14657): a Qwen-VL reads the picture, an
instruction and the prompt; a head scores what it makes of a token of its own at the end."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from rewards.base import Metadata, Scores, Spec
from rewards.qwen import QwenReward, Reader, ranking_head
from rewards.vision import Dtype, load_weights, pick_device, without_prefix
from rewards.wording import WORDINGS, wording

REWARD_TOKEN = "<|Reward|>"
INSTRUCTION = WORDINGS / "hpsv3.txt"
THEIRS = "hpsv3/dataset/data_collator_qwen.py"
CONSTANTS = ("INSTRUCTION", "prompt_with_special_token")


@cache
def load_hpsv3(weights: str, base: str, device: str, dtype: Dtype) -> tuple[Reader, nn.Sequential]:
    """Load network and head; rewards that name the same ones share them."""
    tensors = load_weights(weights)
    reader = Reader(tensors, base, [REWARD_TOKEN], getattr(torch, dtype), "HPSv3")
    head = ranking_head(reader.width)
    head.load_state_dict(without_prefix(tensors, "rm_head."))
    reader.to(pick_device(device)).eval().requires_grad_(False)
    return reader, head.to(pick_device(device)).requires_grad_(False)


class HPSv3(QwenReward):
    """HPSv3: what people prefer, by a Qwen2-VL of 7B; not bounded, better is higher (arXiv 2508.03789).

    Part `spread`: the head's second output, the authors' measure of how unsure it is.

    Args:
        instruction: the model's instruction: a text file with {prompt} and, at the end, the token <|Reward|>; or the
            authors' hpsv3/dataset/data_collator_qwen.py, whose wording the weights were trained on and which their
            scores need. Default: the same criteria in our words.
        weights: the published checkpoint.
        base: folder or hub name of the Qwen2-VL below it, for configuration, tokenizer and chat template.
        batch_size, device, dtype: of the model; the head is float32 always.
    """

    name = "hpsv3"
    spec = Spec(differentiable=True)

    def __init__(
        self,
        instruction: str | None = None,
        weights: str = "MizzenAI/HPSv3/HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        super().__init__(batch_size)
        self.instruction = wording(self.name, [Path(instruction or INSTRUCTION)], CONSTANTS, THEIRS, [REWARD_TOKEN])
        self.reader, self.head = load_hpsv3(weights, base, device, dtype)

    def model_scores(self, pictures: Sequence[Tensor], prompts: Sequence[str], metadata: Metadata) -> Scores:
        texts = [self.instruction.replace("{prompt}", prompt) for prompt in prompts]
        outputs = self.head(self.reader([[picture] for picture in pictures], texts)[:, 0])
        return Scores(outputs[:, 0], {"spread": outputs[:, 1]})


class Condition(nn.Module):
    """Input of HPSv3++ besides the picture: its generator's ability, and how far that was trained with rewards.

    The ability is guessed from the read state; both scale and shift that state before the head.

    Args:
        width: width of the state.
        inner: width of the conditions' embedding.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.cap_encoder = nn.ModuleDict(
            {"proj": nn.Linear(width, inner), "pool_attn": nn.Linear(inner, 1), "out_proj": nn.Linear(inner, 1)}
        )
        self.cond_encoder = nn.Sequential(nn.Linear(2, inner), nn.GELU(), nn.Linear(inner, inner))
        self.film_gen = nn.Sequential(nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 2 * width))

    def forward(self, state: Tensor, iteration: float) -> tuple[Tensor, Tensor]:
        """[B, width] the conditioned state, and [B] the guessed ability in [0, 1].

        The authors pool the ability over the pictures of a call by `pool_attn`; a picture on its own pools to itself.
        """
        ability = self.cap_encoder["out_proj"](self.cap_encoder["proj"](state.detach())).sigmoid()
        known = torch.cat([ability, torch.full_like(ability, iteration)], dim=1)
        scale, shift = self.film_gen(self.cond_encoder(known)).chunk(2, dim=-1)
        return state * (1 + scale) + shift, ability[:, 0]


@cache
def load_hpsv3_plus(weights: str, base: str, device: str, dtype: Dtype) -> tuple[Reader, nn.Sequential, Condition]:
    """Load network, head and condition; rewards that name the same ones share them."""
    tensors = load_weights(weights)
    reader = Reader(tensors, base, [REWARD_TOKEN], getattr(torch, dtype), "HPSv3++")
    head = ranking_head(reader.width)
    head.load_state_dict(without_prefix(tensors, "rm_head."))
    condition = Condition(reader.width, len(tensors["cond_encoder.0.bias"]))
    condition.load_state_dict({name: t for name in condition.state_dict() for t in [tensors[name].float()]})
    for module in (reader, head, condition):
        module.to(pick_device(device)).eval().requires_grad_(False)
    return reader, head, condition


class HPSv3Plus(QwenReward):
    """HPSv3++: as HPSv3 on a Qwen3-VL of 8B, and told how far the generator was trained with rewards (2606.14657).

    Parts: `spread`, the head's second output; `ability`, how able the generator looks, in [0, 1].

    Args:
        instruction: as of `HPSv3`; the authors' file is theirs of HPSv3++.
        weights: the published checkpoint.
        base: folder or hub name of the Qwen3-VL below it, for configuration, tokenizer and chat template.
        iteration: how far the generator was trained, in [0, 1]: before and after training, between which it rises in
            step; the authors train with [0.3, 1] and score with [0, 0].
        batch_size, device, dtype: of the model; head and condition are float32 always.
    """

    name = "hpsv3_plus"

    def __init__(
        self,
        instruction: str | None = None,
        weights: str = "Junjun2333/HPSv3-PlusPlus/hpsv3++.pth",
        base: str = "Qwen/Qwen3-VL-8B-Instruct",
        iteration: tuple[float, float] = (0.0, 0.0),
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        super().__init__(batch_size)
        if not 0 <= iteration[0] <= iteration[1] <= 1:
            raise ValueError(f"hpsv3_plus: iteration {list(iteration)} does not rise within [0, 1]")
        self.instruction = wording(self.name, [Path(instruction or INSTRUCTION)], CONSTANTS, THEIRS, [REWARD_TOKEN])
        self.reader, self.head, self.condition = load_hpsv3_plus(weights, base, device, dtype)
        self.iteration, self.progress = iteration, 0.0
        self.spec = Spec(differentiable=True, scheduled=iteration[0] < iteration[1])

    def advance(self, progress: float) -> None:
        """Say how far training is, in [0, 1]."""
        self.progress = progress

    def model_scores(self, pictures: Sequence[Tensor], prompts: Sequence[str], metadata: Metadata) -> Scores:
        texts = [self.instruction.replace("{prompt}", prompt) for prompt in prompts]
        first, last = self.iteration
        state = self.reader([[picture] for picture in pictures], texts)[:, 0]
        state, ability = self.condition(state, first + (last - first) * self.progress)
        outputs = self.head(state)
        return Scores(outputs[:, 0], {"spread": outputs[:, 1], "ability": ability})
