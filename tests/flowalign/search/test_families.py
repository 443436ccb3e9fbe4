"""Searches with families of other samples than plain pictures: videos, and what is made from pictures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

import flowalign as fa
from flowalign.data import Prompts
from flowalign.planning import tiny_pipelines
from flowalign.policies.settings import Sampling
from flowalign.search import Budget, SearchResult
from flowalign.search.run import build_methods, search
from rewards import RewardError, Scores, Spec
from rewards.frames import PerFrame
from rewards.shapes.clip import TinyCLIP

METHODS = ["best_of_n", "ttsnap", "evosearch", "beam", "fk_steering"]
FAMILIES = ["wan", "wan_i2v", "wan22_5b_i2v", "qwen_image_edit", "flux_kontext", "sd3_inpaint"]


class Light:
    """How light a sample is; of a video its last frame."""

    name = "light"
    spec = Spec(needs=frozenset({"prompt"}))

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        last = [sample[-1] if isinstance(sample, list) else sample for sample in samples]
        return Scores(torch.tensor([sum(picture.convert("L").tobytes()) / 255 for picture in last]))


@pytest.fixture(autouse=True)
def a_megapixel_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    of_area = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: of_area(32 * 32, ratio))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_search_of_one_sample_is_plain_sampling_and_more_find_more(name: str, tmp_path: Path) -> None:
    tiny = tiny_pipelines.PIPELINES[name]
    record: dict[str, Any] = {}
    if tiny.images:
        torch.manual_seed(1)
        files = {}
        for part in ("image", "mask"):
            files[part] = str(tmp_path / f"{part}.png")
            Image.fromarray((torch.rand(16, 32, 3) * 255).byte().numpy()).save(files[part])
        record = files if tiny.masked else {"image": files["image"]}
    policy = fa.load(tiny_pipelines.build(name), encode_options=tiny.encode)
    sides = {key: value for key, value in tiny.call.items() if key in ("height", "width", "num_frames")}
    sampling, prompts = Sampling(steps=3, batch_size=4, **sides), Prompts(["a cat"], [record])

    def searched(methods: list[str], count: int) -> list[SearchResult]:
        budget = Budget("samples", count)
        return search(policy, prompts, build_methods(methods, {}), Light(), sampling, budget, 5, progress=False)

    [plain] = searched(["best_of_n"], 1)
    rollout = policy.sample(["a cat"], [5], metadata=[record], **sampling.arguments() | {"order": 1})
    both = plain.sample, rollout.images[0]
    frames, expected = (sample if isinstance(sample, list) else [sample] for sample in both)
    assert [frame.tobytes() for frame in frames] == [frame.tobytes() for frame in expected]
    for found in searched(METHODS, 4):
        assert found.score >= found.first.score and 0 < found.forwards <= 4 * plain.forwards, found.method
        assert found.score == Light()([found.sample], [], []).value.item(), found.method


def test_a_video_is_guided_by_the_gradient_of_its_frames() -> None:
    """Flow-NRG was made for videos (arXiv 2501.13918)."""
    policy = fa.load(tiny_pipelines.build("wan"))
    call = tiny_pipelines.PIPELINES["wan"].call
    reward = PerFrame(TinyCLIP(), frames=3)

    def found(method: str, reward: Any, **settings: float) -> SearchResult:
        methods, sampling = build_methods([method], settings), Sampling(steps=2, batch_size=2, **call)
        prompts, budget = Prompts(["two red circles"], [{}]), Budget("samples", 3)
        [result] = search(policy, prompts, methods, reward, sampling, budget, 5, progress=False)
        return result

    plain, guided = (found("nrg", reward, strength=strength) for strength in (0.0, 30.0))
    assert guided.score > plain.score + 1e-3
    with pytest.raises(RewardError, match="'tiny_clip' scores pictures, but got videos; 'per_frame' applies it"):
        found("nrg", TinyCLIP())
