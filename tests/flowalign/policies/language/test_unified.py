"""Emu3 plans in words and draws: beside transformers' own guidance, a run of both levels, and what is refused."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image
from transformers import Emu3ForConditionalGeneration, UnbatchedClassifierFreeGuidanceLogitsProcessor

from flowalign.config import load
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.unified import FREE, UnifiedPolicy
from flowalign.training import Trainer

ROOT = Path(__file__).parents[4]
PROMPTS, SEEDS = ["two red circles", "a blue square"], [1, 2]


def length_of(side: int) -> int:
    """Tokens of a picture: its beginning, its size and a token, rows with their ends, three at its end."""
    return 1 + 4 + side * (side + 1) + 3


PICTURE = length_of(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny unified model with random weights, as its script saves it."""
    spec = importlib.util.spec_from_file_location("build_tiny_emu3", ROOT / "scripts" / "build_tiny_emu3.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(0)
    tokens = script.tokenizer()
    path = tmp_path_factory.mktemp("emu3")
    script.network(tokens).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def policy_of(folder: Path, **draws: Any) -> UnifiedPolicy:
    return UnifiedPolicy.from_pretrained(folder, instruction="plan", **draws)


@pytest.mark.parametrize(("side", "thinking", "guidance"), [(2, 0, 1.0), (4, 5, 3.0)])
def test_log_probabilities_are_those_of_transformers_guidance(
    folder: Path, side: int, thinking: int, guidance: float
) -> None:
    policy = policy_of(folder, height=side, width=side, thinking=thinking, guidance=guidance)
    rollout = policy.sample(PROMPTS, SEEDS, max_new_tokens=thinking + length_of(side))
    assert policy.verify(rollout) < 1e-4
    # the row that is padded more
    prompt, tokens = rollout.prompt_ids[1][rollout.prompt_mask[1]], rollout.completion_ids[1][rollout.mask[1]]
    begins = tokens.tolist().index(policy.tokenizer.boi_token_id)
    expected = _literal(policy, prompt, tokens, begins)
    torch.testing.assert_close(rollout.log_prob[1][rollout.mask[1]], expected, atol=1e-4, rtol=0)
    for token, given in zip(tokens[begins + 1 :].tolist(), policy.picture, strict=True):
        assert policy.visual[token] if given == FREE else token == given


def _literal(policy: UnifiedPolicy, prompt: torch.Tensor, tokens: torch.Tensor, begins: int) -> torch.Tensor:
    """One token after the other, the whole text read anew for each; guidance is transformers' own."""
    network, log_prob = policy.network, []
    picture = [policy.tokenizer.boi_token_id, *policy.picture]
    empty = torch.tensor([policy.begin("")])
    for t, token in enumerate(tokens.tolist()):
        before = torch.cat([prompt, tokens[:t]])[None]
        logits = network(input_ids=before, use_cache=False).logits[:, -1]
        if t <= begins:
            allowed = policy.words.clone()
            if t == policy.thinking:
                allowed = torch.arange(len(allowed)) == token
        elif picture[t - begins] != FREE:
            allowed = torch.arange(len(policy.words)) == token
        else:
            allowed = policy.visual
            without = torch.cat([empty, tokens[None, begins:t]], 1)
            # a new one knows all of the row without a prompt
            guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(
                policy.guidance, network, unconditional_ids=without, use_cache=False
            )
            logits = guide(before, logits)
        log_prob.append(logits[0].masked_fill(~allowed, -torch.inf).log_softmax(-1)[token])
    return torch.stack(log_prob).detach()


def test_a_picture_is_decoded_by_the_models_own_method_and_follows_from_its_seed_alone(folder: Path) -> None:
    policy = policy_of(folder, height=4, width=4, thinking=5, guidance=2.0)
    rollout = policy.sample(PROMPTS, SEEDS, max_new_tokens=5 + PICTURE)
    alone = policy.sample(PROMPTS[1:], SEEDS[1:], max_new_tokens=5 + PICTURE)
    [picture] = policy.decode(alone)
    assert picture.tobytes() == policy.decode(rollout)[1].tobytes() and policy.plans(alone) == policy.plans(rollout)[1:]
    whole = alone.completion_ids[0][alone.mask[0]][-4 * 5 - 3 :]
    pixels = Emu3ForConditionalGeneration.from_pretrained(folder).decode_image_tokens(
        image_tokens=whole[None], height=4, width=4
    )
    expected = ((pixels[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0)
    assert torch.equal(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(16, 16, 3), expected)


def darkness(images: Sequence[Image], prompts: Sequence[str]) -> list[float]:
    return [1 - image.resize((1, 1)).convert("L").getpixel((0, 0)) / 255 for image in images]


def test_a_run_of_both_levels_learns_from_pictures_and_leaves_the_decoder_alone(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    changes = [
        f"model.path={folder}",
        f"output={tmp_path}",
        "training.iterations=1",
        "training.prompts_per_iteration=2",
        "training.group_size=4",
        "training.optimizer.warmup_updates=0",
        "model.draws.height=2",
        "model.draws.width=2",
        "model.draws.thinking=2",
        f"rollout.max_new_tokens={2 + length_of(2)}",
        f"data.prompts={prompts}",
        f"evaluation.prompts={prompts}",
        "name=run",
    ]
    trainer = Trainer(load(ROOT / "configs" / "tiny_emu3" / "t2i_r1.yaml", changes), reward=darkness, progress=False)
    before = {name: weight.clone() for name, weight in trainer.policy.network.state_dict().items()}
    trainer.train()
    moved = {name for name, weight in trainer.policy.network.state_dict().items() if not weight.equal(before[name])}
    assert moved and not any("vqmodel" in name for name in moved)
    assert len(list((tmp_path / "run" / "samples" / "iteration-000001").glob("*.png"))) == len(PROMPTS)


def test_what_cannot_draw_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"rollout.max_new_tokens={5 + PICTURE} works"):
        policy_of(folder, height=4, width=4, thinking=5).sample(PROMPTS, SEEDS, max_new_tokens=64)
    lm = LanguagePolicy.from_pretrained(ROOT / "flowalign" / "data" / "assets" / "tiny_lm")
    with pytest.raises(ConfigError, match="Emu3ForConditionalGeneration does"):
        UnifiedPolicy(lm.network, lm.tokenizer)
    with pytest.raises(ConfigError, match=r"model.chat: with model.draws"):
        Trainer(load(ROOT / "configs" / "tiny_emu3" / "t2i_r1.yaml", ["model.chat=true"]))
