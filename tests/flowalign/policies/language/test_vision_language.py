"""The policy over an image-text-to-text model, on the shipped tiny VLM: replay is a fresh forward pass of one row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.vision_language import VisionLanguagePolicy
from rewards.judges import Local, PairwiseJudgeReward
from rewards.shapes import draw, sample_requests, train_requests

ASK = "Which picture shows {} better, 1 or 2?"
SAMPLING = {"max_new_tokens": 6, "temperature": 1.5}


def tiny() -> VisionLanguagePolicy:
    return VisionLanguagePolicy.from_pretrained(ASSETS / "tiny_vlm")


def questions(count: int = 6) -> tuple[list[str], list[dict[str, Any]]]:
    """Of two pictures, of one, and of none; of different lengths."""
    rng = np.random.default_rng(0)
    requests = sample_requests(train_requests(), count, rng)
    pictures = [Image.fromarray(draw(request, rng)) for request in requests]
    prompts, metadata = [], []
    for i, request in enumerate(requests):
        shown = [[pictures[i], pictures[i - 1]], pictures[i], []][i % 3]
        prompts.append([ASK.format(request.prompt), "Describe this picture.", "Score: 3"][i % 3])
        metadata.append({"image": shown} if i % 3 < 2 else {})
    return prompts, metadata


def plain_log_probs(policy: VisionLanguagePolicy, rollout: TextRollout, row: int) -> torch.Tensor:
    """One row alone, without padding or cache, through the processor and the network alone."""
    content = [{"type": "image"} for _ in rollout.pictures[row]] + [{"type": "text", "text": rollout.prompts[row]}]
    turn = [{"role": "user", "content": content}]
    text = policy.processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = policy.processor(text=[text], images=rollout.pictures[row] or None, return_tensors="pt")
    completion = rollout.completion_ids[row][rollout.mask[row]]
    start = inputs.input_ids.shape[1]
    inputs["input_ids"] = torch.cat([inputs.input_ids, completion[None]], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        logits = policy.network(**inputs).logits[0]
    logits[:, policy.network.config.image_token_id] = -torch.inf
    log_probs = (logits / rollout.decoding.temperature).log_softmax(-1)[start - 1 : -1]
    return log_probs.gather(1, completion[:, None])[:, 0]


@pytest.mark.parametrize("lora", [False, True])
def test_sampled_log_probs_are_those_of_a_plain_forward_pass(lora: bool) -> None:
    policy, (prompts, metadata) = tiny(), questions()
    if lora:
        policy.add_lora(4, 8)
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.add_(0.1 * torch.randn_like(parameter))
    rollout = policy.sample(prompts, list(range(6)), metadata=metadata, batch_size=4, **SAMPLING)
    assert rollout.mask.sum(1).unique().numel() > 1
    again, _ = policy.log_probs(rollout, torch.arange(6))
    torch.testing.assert_close(again, rollout.log_prob, atol=1e-5, rtol=0)
    some, _ = policy.log_probs(rollout, torch.tensor([4, 2]))
    torch.testing.assert_close(some, rollout.log_prob[[4, 2]], atol=1e-5, rtol=0)
    for row in range(6):
        expected = plain_log_probs(policy, rollout, row)
        torch.testing.assert_close(rollout.log_prob[row][rollout.mask[row]], expected, atol=1e-5, rtol=0)
    assert policy.verify(rollout) < 1e-5


def test_no_text_has_a_token_that_stands_for_a_picture() -> None:
    policy, (prompts, metadata) = tiny(), questions(3)
    image = policy.network.config.image_token_id
    by_far = torch.nn.functional.one_hot(torch.tensor(image), policy.network.config.text_config.vocab_size) * 100
    policy.network.get_output_embeddings().bias = torch.nn.Parameter(by_far.float())
    rollout = policy.sample(prompts, list(range(3)), metadata=metadata, **SAMPLING)
    assert not (rollout.completion_ids == image).any()
    again, _ = policy.log_probs(rollout, torch.arange(3))
    torch.testing.assert_close(again, rollout.log_prob, atol=1e-5, rtol=0)


def test_the_pictures_matter_and_a_text_depends_on_nothing_else() -> None:
    policy, (prompts, metadata) = tiny(), questions()
    rollout = policy.sample(prompts, [3] * 6, metadata=metadata, **SAMPLING)
    alone = policy.sample(prompts[1:2], [3], metadata=metadata[1:2], **SAMPLING)
    assert policy.decode(alone) == policy.decode(rollout)[1:2]
    rollout.pictures[1] = rollout.pictures[4]
    other, _ = policy.log_probs(rollout, torch.tensor([1]))
    assert (other - rollout.log_prob[1]).abs().max() > 1e-2
    grey = {"image": Image.new("RGB", (64, 64), (128, 128, 128))}
    (plain,), (noisy,) = policy.pictures([grey, grey | {"image_noise": 0.1}])
    assert np.asarray(plain).std() == 0 and np.asarray(noisy).std() / 255 == pytest.approx(0.1, rel=0.02)


def test_lora_leaves_the_eyes_alone_and_the_reference_is_the_start() -> None:
    policy, (prompts, metadata) = tiny(), questions()
    rollout = policy.sample(prompts, list(range(6)), metadata=metadata, **SAMPLING)
    policy.add_lora(4, 8)
    names = policy.trainable()
    assert names and all("language_model" in name and "lora" in name for name in names)
    with torch.no_grad():
        for parameter in names.values():
            parameter.add_(0.1 * torch.randn_like(parameter))
        moved, _ = policy.log_probs(rollout, torch.arange(6))
        with policy.reference():
            kept, _ = policy.log_probs(rollout, torch.arange(6))
    torch.testing.assert_close(kept, rollout.log_prob, atol=1e-5, rtol=0)
    assert (moved - kept).abs().max() > 1e-2


def test_what_is_saved_is_a_judge(tmp_path: Path) -> None:
    policy = tiny()
    policy.train_all()
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.save(tmp_path)
    prompts, metadata = questions()
    rollout = policy.sample(prompts, list(range(6)), metadata=metadata, **SAMPLING)
    fresh = tiny()
    fresh.load(tmp_path)
    again, _ = fresh.log_probs(rollout, torch.arange(6))
    torch.testing.assert_close(again, rollout.log_prob, atol=1e-5, rtol=0)
    judge = PairwiseJudgeReward("shapes_better", Local(str(tmp_path), device="cpu"))
    first, second = metadata[0]["image"]
    assert 0 < judge.compare([first], [second], ["a red circle"], [{}]).value.item() < 1


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no image-text-to-text model at"):
        VisionLanguagePolicy.from_pretrained(tmp_path)
    policy = tiny()
    policy.network.config.text_config.max_position_embeddings = 40
    with pytest.raises(ConfigError, match="do not fit into the model's context of 40"):
        policy.sample(*[questions()[0], [0] * 6], metadata=questions()[1], **SAMPLING)
