"""Both backends against the model's own logits, computed here one sequence at a time."""

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowalign.evaluation.reliability import measure
from rewards import RewardError
from rewards.judges import JudgeReward, Local, PairwiseJudgeReward, Served
from rewards.pairwise import WinRate

TOLERANCE = 1e-5


class Direct:
    """The model itself."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(path)

    def logits(self, images: list[Image.Image], text: str, answer: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """[L, V] logits and [L] tokens of one conversation."""
        pictures = "".join("<img>" + "<image>" * 16 + "</img>" for _ in images)  # 32x32 pixels: 16 tokens
        tokens = self.processor.tokenizer(
            f"<|user|>{pictures}{text}<|end|><|assistant|>{answer}", return_tensors="pt"
        ).input_ids
        pixels = np.stack([np.asarray(image) for image in images])
        pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            return self.model(input_ids=tokens, pixel_values=pixels).logits[0], tokens[0]

    def chance(self, images: list[Image.Image], text: str, good: str, bad: str) -> float:
        """Probability of one word against another, over every token that spells them."""
        chances = self.logits(images, text)[0][-1].softmax(-1)
        words = [self.processor.tokenizer.decode([i]).strip().lower() for i in range(len(self.processor.tokenizer))]
        yes = sum(chances[i].item() for i, word in enumerate(words) if word == good)
        no = sum(chances[i].item() for i, word in enumerate(words) if word == bad)
        return yes / (yes + no)


@pytest.fixture(scope="module")
def direct(tiny_vlm):
    return Direct(tiny_vlm)


@pytest.fixture(params=["local", "served"])
def backend(request, tiny_vlm):
    if request.param == "local":
        return Local(tiny_vlm, device="cpu", batch_size=3)
    return Served(url=request.getfixturevalue("openai_url"), model="tiny", concurrency=4)


def test_yes_probability(backend, direct, pictures):
    images, prompts, metadata = pictures
    prompts = prompts[::-1]  # some yes, some no
    scores = JudgeReward("shapes_show", backend)(images, prompts, metadata)
    wanted = [
        direct.chance([image], f"Does this picture show {prompt}?", "yes", "no")
        for image, prompt in zip(images, prompts)
    ]
    assert scores.value.tolist() == pytest.approx(wanted, abs=TOLERANCE)
    assert scores.parts["unparsed"].tolist() == [0.0] * len(images)


def test_prompt_echo(backend, direct, pictures):
    images, prompts, metadata = pictures
    scores = JudgeReward("shapes_describe", backend)(images, prompts, metadata)
    wanted = []
    for image, prompt in zip(images, prompts):
        logits, tokens = direct.logits([image], "Describe this picture.", prompt)
        count = len(direct.processor.tokenizer(prompt).input_ids)
        cross_entropy = torch.nn.functional.cross_entropy(logits[-count - 1 : -1], tokens[-count:])
        wanted.append(-cross_entropy.item())
    assert scores.value.tolist() == pytest.approx(wanted, abs=TOLERANCE)


def test_pairwise_in_both_orders(backend, direct, pictures):
    images, prompts, metadata = pictures
    others = images[::-1]
    judge = PairwiseJudgeReward("shapes_better", backend, both_orders=True)
    there = [
        direct.chance([a, b], f"Which picture shows {p} better, 1 or 2?", "1", "2")
        for a, b, p in zip(images, others, prompts)
    ]
    back = [
        direct.chance([b, a], f"Which picture shows {p} better, 1 or 2?", "1", "2")
        for a, b, p in zip(images, others, prompts)
    ]
    wanted = [(x + 1 - y) / 2 for x, y in zip(there, back)]
    assert judge.compare(images, others, prompts, metadata).value.tolist() == pytest.approx(wanted, abs=TOLERANCE)
    swapped = judge.compare(others, images, prompts, metadata).value
    assert swapped.tolist() == pytest.approx([1 - p for p in wanted], abs=TOLERANCE)
    # the order given, for those who turn pairs round themselves
    once = PairwiseJudgeReward("shapes_better", backend).compare(images, others, prompts, metadata)
    assert once.value.tolist() == pytest.approx(there, abs=TOLERANCE)


def test_win_rate_of_a_group(backend, pictures):
    images, metadata = pictures[0][:4], pictures[2][:4]
    group = [pictures[1][0]] * 4
    judge = PairwiseJudgeReward("shapes_better", backend)
    values = WinRate(judge)(images, group, metadata).value
    assert values.mean().item() == pytest.approx(0.5)
    turned = WinRate(judge)(images[::-1], group, metadata).value
    assert turned.flip(0).tolist() == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_reference_is_asked_in_both_orders(backend, direct, pictures):
    images, prompts, _ = pictures
    judge = JudgeReward("one_reward", backend)
    metadata = [{"reference": image, "task": "text rendering"} for image in images]
    # a picture against itself
    assert judge(images, prompts, metadata).value.tolist() == pytest.approx([0.5] * len(images), abs=TOLERANCE)


@pytest.mark.parametrize("template", ["shapes_show", "shapes_describe"])
def test_batch_size_and_order_do_not_matter(tiny_vlm, pictures, template):
    images, prompts, metadata = pictures
    values = JudgeReward(template, Local(tiny_vlm, device="cpu", batch_size=1))(images, prompts, metadata).value
    whole = JudgeReward(template, Local(tiny_vlm, device="cpu", batch_size=8))
    assert whole(images, prompts, metadata).value.tolist() == pytest.approx(values.tolist(), abs=TOLERANCE)
    turned = whole(images[::-1], prompts[::-1], metadata).value
    assert turned.flip(0).tolist() == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_a_server_without_log_probabilities_says_what_works(openai_url, pictures):
    judge = JudgeReward("shapes_show", Served(url=openai_url, model="mute"))
    with pytest.raises(RewardError, match="gives no log-probabilities.*unified_reward_point") as raised:
        judge(*pictures)
    assert "\n" not in str(raised.value)


def test_replies_agree_between_backends(tiny_vlm, openai_url, pictures):
    from rewards.judges import Question

    images = pictures[0]
    questions = [Question((image,), "Describe this picture.") for image in images]
    local = Local(tiny_vlm, device="cpu", batch_size=3).build("local")
    served = Served(url=openai_url, model="tiny").build("served")
    texts = local.reply(questions, 0.0, 16, seed=0)
    assert texts == served.reply(questions, 0.0, 16, seed=0)
    assert all(texts)
    # samples differ by seed, agree for one seed, and leave the global random numbers alone
    state = torch.get_rng_state()
    hot = [local.reply(questions, 3.0, 16, seed=seed) for seed in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]
    assert torch.equal(state, torch.get_rng_state())


def test_gumbel_noise_samples_the_softmax():
    from rewards.judges.local import Gumbel

    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    sampler = Gumbel(0.7, torch.Generator().manual_seed(0))
    drawn = sampler(torch.zeros(20_000, 1), logits.expand(20_000, -1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    assert shares.tolist() == pytest.approx((logits / 0.7).softmax(-1)[0].tolist(), abs=0.01)


def test_many_requests_in_flight_within_the_limit(openai_url, pictures):
    images, prompts, metadata = pictures
    httpx2.get(openai_url.replace("/v1", "/stats"))  # starts counting anew
    JudgeReward("shapes_show", Served(url=openai_url, model="tiny", concurrency=4))(
        images * 4, prompts * 4, metadata * 4
    )
    stats = httpx2.get(openai_url.replace("/v1", "/stats")).json()
    assert stats["calls"] == 32 and 1 < stats["most_in_flight"] <= 4


def test_labels_that_are_not_there(backend, tmp_path, pictures):
    template = tmp_path / "odd.yaml"
    template.write_text(
        "source: a test\nanswer: probability\nquestions:\n"
        "  - {name: odd, ask: 'Does this picture show {prompt}?', labels: [ß, ü]}\n"
    )
    with pytest.raises((RewardError, ValueError), match=r"could not be parsed|no token"):
        JudgeReward(str(template), backend)(*pictures)


def test_videos_are_seen_by_frames(tiny_vlm, pictures):
    images, prompts, metadata = pictures
    judge = JudgeReward("video_reward", Local(tiny_vlm, device="cpu"), frames=3, max_tokens=8)
    assert "frames" in judge.spec.needs
    assert judge._frames(images) == [images[0], images[4], images[7]]  # of eight: 0, 3.5, 7
    with pytest.raises(RewardError, match="could not be parsed"):
        judge([images[:3], images[3:]], prompts[:2], metadata[:2])  # the tiny model knows no such format


def test_both_backends_are_as_reliable(tiny_vlm, openai_url, pictures):
    images, prompts, _ = pictures
    prompts = [prompts[i // 4] for i in range(8)]
    kinds = ((JudgeReward, "shapes_show"), (PairwiseJudgeReward, "shapes_better"))
    for kind, template in kinds:
        local, served = (
            measure(kind(template, judge), images, prompts, [{}] * 8, draws=2)
            for judge in (Local(tiny_vlm, device="cpu"), Served(url=openai_url, model="tiny"))
        )
        assert served.noise.high < 1e-4 and served.needed.mean == local.needed.mean == 1
        assert served.within.mean == pytest.approx(local.within.mean, abs=1e-3)
        assert (served.prefers_first is None) == (kind is JudgeReward) and served.seconds > 0
