"""Masked diffusion of texts: beside diffusers' pipeline, and every trajectory of a small state space enumerated."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.language.masked import MaskedPolicy, opening_steps
from flowalign.policies.language.rollout import TextRollout

SHIPPED = ASSETS / "tiny_masked_lm"
PROMPTS, SEEDS = ["12+34=", "9-5=", "70+08="], [1, 2, 3]
WORDS, END, MASK = 3, 2, 3


@pytest.mark.parametrize("order", ["rates", "confidence"])
def test_a_replay_gives_the_recorded_log_probabilities_and_a_text_follows_from_its_seed_alone(order: str) -> None:
    policy = MaskedPolicy.from_pretrained(SHIPPED, steps=4, order=order)
    rollout = policy.sample(PROMPTS, SEEDS, max_new_tokens=5, temperature=1.5, top_k=12)
    assert policy.forwards == 3 * len(rollout.step.unique()) and policy.verify(rollout) < 1e-5
    assert not (rollout.completion_ids == policy.tokenizer.mask_token_id).any()
    alone = policy.sample(PROMPTS[1:2], SEEDS[1:2], max_new_tokens=5, temperature=1.5, top_k=12)
    assert torch.equal(alone.completion_ids[0], rollout.completion_ids[1])
    assert torch.equal(alone.step[0], rollout.step[1])
    joined = TextRollout.cat([alone, policy.sample(PROMPTS[:1], SEEDS[:1], max_new_tokens=7)])
    assert joined[[0]].step[0].tolist() == [*alone.step[0].tolist(), -1, -1] and policy.verify(joined[[0]]) < 1e-5


def test_what_is_decoded_stops_at_the_end_and_what_follows_was_drawn_too() -> None:
    policy = MaskedPolicy.from_pretrained(SHIPPED)
    rollout = policy.sample(PROMPTS[:1], SEEDS[:1], max_new_tokens=5)
    end = policy.tokenizer.eos_token_id
    one, two, minus = policy.tokenizer.convert_tokens_to_ids(["1", "2", "-"])
    rollout = replace(rollout, completion_ids=torch.tensor([[one, two, end, minus, end]]))
    assert policy.decode(rollout) == ["12"] and rollout.mask.all()


def test_the_surest_first_is_the_pipelines_order() -> None:
    """LLaDA2Pipeline with one block for the prompt, one for the text, and a threshold that no confidence reaches."""
    policy = MaskedPolicy.from_pretrained(SHIPPED, steps=3, order="confidence")
    # the pipeline may draw a mask
    policy.network.decoder.bias.data[policy.tokenizer.mask_token_id] = -1e9
    prompts = ["12+34=", "90-55=", "70+08="]
    made = policy.sample(prompts, SEEDS, max_new_tokens=7, temperature=0.0)
    pipeline = LLaDA2Pipeline(policy.network, BlockRefinementScheduler(), policy.tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    opened: list[tuple[Tensor, Tensor]] = []

    def keep(pipeline: LLaDA2Pipeline, number: int, step: int, made: dict[str, Tensor]) -> dict[str, Tensor]:
        opened.append((made["transfer_index"], made["sampled_probs"]))
        return {}

    expected = pipeline(
        input_ids=made.prompt_ids,
        gen_length=7,
        block_length=7,
        num_inference_steps=3,
        threshold=2.0,
        editing_threshold=None,
        eos_early_stop=False,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["transfer_index", "sampled_probs"],
    )
    assert made.prompt_ids.shape == (3, 7) and torch.equal(made.completion_ids, expected.sequences)
    for k, (which, chance) in enumerate(opened):
        assert torch.equal(made.step == k, which)
        torch.testing.assert_close(made.log_prob[which].exp(), chance[which], atol=1e-5, rtol=0)
    assert [which.sum(1).tolist() for which, _ in opened] == [[3] * 3, [2] * 3, [2] * 3]


def small(seed: int) -> MaskedPolicy:
    """Three words, the last of which ends a text, and random weights."""
    vocabulary = {"a": 0, "b": 1, "</s>": END, "<mask>": MASK}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", mask_token="<mask>")
    config = ModernBertConfig(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        pad_token_id=END,
        initializer_range=0.7,
    )
    torch.manual_seed(seed)
    return MaskedPolicy(ModernBertForMaskedLM(config), tokens, steps=2)


@torch.no_grad()
def chance_of_step(policy: MaskedPolicy, before: tuple[int, ...], after: tuple[int, ...], k: int) -> float:
    """Of two positions after the prompt 'a', by the paper's sum over predictions of each position's last state."""
    steps = policy.steps
    logits = policy.network(torch.tensor([[0, *before]])).logits[0, 1:]
    total = 1.0
    for position in range(2):
        start, end = before[position], after[position]
        if start != MASK:
            total *= float(start == end)
            continue
        prediction = logits[position, :WORDS].softmax(-1)
        rate = 1 / (1 - k / steps)
        stays = 0.0 if k == steps - 1 else math.exp(-rate / steps)
        jumps = sum(prediction[x].item() * (x == end) * (1 - stays) for x in range(WORDS))
        total *= stays if end == MASK else jumps
    return total


def trajectories() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every pair of steps in which two positions open, with every pair of words."""
    pairs = list(itertools.product(range(2), repeat=2))
    return list(itertools.product(pairs, itertools.product(range(WORDS), repeat=2)))


def rollout_of(policy: MaskedPolicy) -> TextRollout:
    """All trajectories as one rollout."""
    every = trajectories()
    rollout = policy.sample(["a"] * len(every), range(len(every)), max_new_tokens=2)
    steps, words = (torch.tensor(values) for values in zip(*every, strict=True))
    return replace(rollout, step=steps, completion_ids=words)


def literal(policy: MaskedPolicy) -> Tensor:
    """[36] probabilities of the trajectories, one step after the other."""
    chances = []
    for steps, words in trajectories():
        middle = tuple(word if step == 0 else MASK for step, word in zip(steps, words, strict=True))
        first = chance_of_step(policy, (MASK, MASK), middle, 0)
        chances.append(first * chance_of_step(policy, middle, words, 1))
    return torch.tensor(chances)


def test_trajectories_have_the_probability_of_their_transitions() -> None:
    policy = small(0)
    rollout = rollout_of(policy)
    log_prob, _ = policy.log_probs(rollout, torch.arange(36))
    # chances of the schedule, from a fine grid of uniform numbers
    grid = opening_steps((torch.arange(100_000) + 0.5) / 100_000, 2).bincount() / 100_000
    made = grid[rollout.step].prod(1) * log_prob.detach().sum(1).exp()
    expected = literal(policy)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)
    assert abs(expected.sum().item() - 1) < 1e-5


def test_ratios_of_opened_tokens_turn_one_models_distribution_into_anothers() -> None:
    old, new = small(0), small(1)
    rollout, every = rollout_of(old), torch.arange(36)
    ratio = (new.log_probs(rollout, every)[0] - old.log_probs(rollout, every)[0]).detach().sum(1).exp()
    torch.testing.assert_close(literal(old) * ratio, literal(new), atol=1e-5, rtol=1e-4)
    assert (ratio - 1).abs().max() > 0.5


def test_samples_are_distributed_as_their_trajectories() -> None:
    policy, every = small(0), trajectories()
    rollout = policy.sample(["a"] * 5_000, range(5_000), max_new_tokens=2, batch_size=5_000)
    number = {key: i for i, key in enumerate(every)}
    rows = zip(rollout.step.tolist(), rollout.completion_ids.tolist(), strict=True)
    drawn = torch.tensor([number[tuple(steps), tuple(words)] for steps, words in rows]).bincount(minlength=36)
    expected = 5_000 * literal(policy)
    statistic = ((drawn - expected) ** 2 / expected).sum()
    # the 0.999 quantile of chi-squared with 35 degrees of freedom
    assert statistic < 66.6


def test_a_model_without_a_token_for_masks_is_refused() -> None:
    policy = MaskedPolicy.from_pretrained(SHIPPED)
    policy.tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="no token for masks"):
        MaskedPolicy(policy.network, policy.tokenizer)
