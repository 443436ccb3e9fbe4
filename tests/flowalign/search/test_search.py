"""Searches of the shipped pipeline: what they share with plain sampling, what they keep, and what they refuse."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.autograd import grad

import flowalign as fa
from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.data import Preferences, Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.scores import evaluate
from flowalign.planning import tiny_pipelines
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.rlg import weighed
from flowalign.policies.settings import Sampling
from flowalign.search import Engine
from flowalign.search.store import SearchStore
from rewards.rules import JPEGSize
from rewards.shapes.clip import TinyCLIP

PROMPT = "two red circles"


@pytest.fixture(scope="module")
def policy(tiny_policy: Callable[..., DiffusersPolicy]) -> DiffusersPolicy:
    """With a LoRA that has learned something."""
    own = tiny_policy()
    own.add_lora(rank=4, alpha=8)
    generator = torch.Generator().manual_seed(0)
    for parameter in own.trainable().values():
        parameter.data.normal_(generator=generator, std=0.05)
    return own


def test_a_dry_rollout_has_the_start_noise_and_conditions_of_a_real_one(policy: DiffusersPolicy) -> None:
    begin = policy.forwards
    dry = policy.sample([PROMPT] * 2, [3, 4], steps=3, guidance=2.0, dry=True)
    assert policy.forwards == begin
    real = policy.sample([PROMPT] * 2, [3, 4], steps=3, guidance=2.0)
    assert torch.equal(dry.trajectory.latents[:, 0], real.trajectory.latents[:, 0])
    assert torch.equal(dry.trajectory.sigmas, real.trajectory.sigmas)
    x, steps = torch.randn(2, *dry.trajectory.latents.shape[2:]), torch.tensor([0, 2])
    with torch.no_grad():
        both = [policy.velocity(rollout, torch.arange(2), steps, x) for rollout in (dry, real)]
    assert torch.equal(*both)
    assert dry.conditions.branches == 2


def test_the_best_of_n_is_among_plain_samples_bit_for_bit(policy: DiffusersPolicy) -> None:
    samples = policy.sample(PROMPT, [7, 8, 9, 10], n=4, steps=3).images
    scores = JPEGSize()(samples, [PROMPT] * 4, [{}] * 4).value
    [found] = fa.find(policy, [PROMPT], JPEGSize(), budget="forwards=12", seed=7, steps=3, progress=False)
    assert [node.score for node in found.nodes] == scores.tolist()
    assert found.sample.tobytes() == samples[int(scores.argmax())].tobytes()
    # also where the policy has learned to move its start noise
    for moved in (None, lambda start: start.trajectory.latents[:, 0].flip(-1)):
        policy.start_noise = moved
        [one] = fa.find(policy, [PROMPT], JPEGSize(), budget="samples=1", seed=7, steps=3, guidance=2.0, progress=False)
        assert one.forwards == 6
        assert one.sample.tobytes() == policy.sample(PROMPT, [7], steps=3, guidance=2.0).images[0].tobytes()
    policy.start_noise = None


def test_a_loaded_policy_is_searched(policy: DiffusersPolicy) -> None:
    own, texts = fa.load(policy.pipeline), [PROMPT, "one blue square"]
    given: dict[str, Any] = {"budget": "samples=3", "steps": 2, "progress": False, "seed": 5}
    found = own.search(texts, "best_of_n", "shapes", **given)
    again = fa.find(own, texts, "shapes", **given)
    assert [one.record() for one in found] == [one.record() for one in again]
    assert found.scores == [max(node.score for node in one.nodes) for one in found]
    assert [sample.tobytes() for sample in found.samples] == [one.sample.tobytes() for one in again]
    assert found._repr_html_().count("<img") == 2
    with pytest.raises(ConfigError, match="reward: name what to search for"):
        own.search(texts)


def test_guidance_by_weights_goes_through_the_base_and_the_tuned_model(policy: DiffusersPolicy) -> None:
    settings: dict[str, Any] = {"seeds": [0, 1], "n": 2, "steps": 3, "guidance": 2.0}
    tuned, begin = policy.sample(PROMPT, **settings), policy.forwards
    with policy.reference():
        base = policy.sample(PROMPT, **settings)
    plain = policy.forwards - begin
    latents = {w: policy.sample(PROMPT, rlg=w, **settings).trajectory.latents for w in (0.0, 1.0)}
    assert torch.equal(latents[0.0], base.trajectory.latents)
    assert torch.equal(latents[1.0], tuned.trajectory.latents)
    assert not torch.allclose(latents[0.0], latents[1.0], atol=1e-3)
    begin = policy.forwards
    beyond = policy.sample(PROMPT, rlg=1.6, **settings)
    assert policy.forwards - begin == 2 * plain
    # the same start: 1.6 times what the LoRA changed in the guided velocity
    expected = weighed(base.trajectory.velocity[:, 0], (1.6, tuned.trajectory.velocity[:, 0]))
    torch.testing.assert_close(beyond.trajectory.velocity[:, 0], expected, atol=1e-5, rtol=0)
    assert policy.verify(beyond) < 1e-4
    # from the second step on
    begin = policy.forwards
    later = policy.sample(PROMPT, rlg=1.6, rlg_from=1, **settings)
    assert policy.forwards - begin == 2 * plain - plain // 3
    assert torch.equal(later.trajectory.latents[:, 1], tuned.trajectory.latents[:, 1])
    assert not torch.allclose(later.trajectory.final, tuned.trajectory.final, atol=1e-3)
    assert policy.verify(later) < 1e-4
    at = torch.tensor([2, 0])
    with torch.no_grad():
        both, mixed = (policy.velocity(replace(later, rlg_from=k), torch.arange(2), at) for k in (0, 1))
    torch.testing.assert_close(mixed, torch.stack([both[0], tuned.trajectory.velocity[1, 0]]), atol=1e-5, rtol=0)
    assert not torch.allclose(both[1], mixed[1], atol=1e-3)
    # a search under it
    engine = Engine(policy, JPEGSize(), PROMPT, Sampling(steps=3, rlg=1.6, guidance=2.0))
    assert engine.unit == 4
    with torch.no_grad():
        ends = engine.finish(engine.start(2))
    torch.testing.assert_close(ends.x, beyond.trajectory.final, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen_image", "lumina2"])
def test_velocities_are_guided_before_they_are_weighed(name: str) -> None:
    """Guidance that rescales is not linear."""
    policy = fa.load(tiny_pipelines.build(name), encode_options=tiny_pipelines.PIPELINES[name].encode)
    policy.add_lora(rank=4, alpha=8)
    for parameter in policy.trainable().values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0), std=0.2)
    settings: dict[str, Any] = {"seeds": [0, 1], "n": 2, "steps": 3, "guidance": 3.0}
    settings |= tiny_pipelines.PIPELINES[name].call
    tuned, begin = policy.sample(PROMPT, **settings), policy.forwards
    plain = policy.forwards - begin
    with policy.reference():
        base = policy.sample(PROMPT, **settings)
    begin = policy.forwards
    beyond = policy.sample(PROMPT, rlg=1.6, kernel="cps", eta=0.7, **settings)
    assert policy.forwards - begin == 2 * (plain or 12)
    expected = weighed(base.trajectory.velocity[:, 0], (1.6, tuned.trajectory.velocity[:, 0]))
    torch.testing.assert_close(beyond.trajectory.velocity[:, 0], expected, atol=1e-4, rtol=0)
    assert policy.verify(beyond) < 1e-4
    # with the noise and the solver of other rollouts
    one, later = (policy.sample(PROMPT, rlg=w, rlg_from=k, **settings) for w, k in (((1.0, 0), (1.6, 1))))
    torch.testing.assert_close(one.trajectory.latents[:, 1], later.trajectory.latents[:, 1], atol=1e-5, rtol=0)
    assert not torch.allclose(one.trajectory.final, later.trajectory.final, atol=1e-3)


def test_weighed_velocities_are_those_of_the_mixture_of_scores() -> None:
    """Of Gaussians, in closed form; a velocity is -(x + sigma * score) / (1 - sigma)."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)

    def log_density(mean: float, std: float, sigma: float) -> torch.Tensor:
        return -((x - (1 - sigma) * mean) ** 2) / (2 * (((1 - sigma) * std) ** 2 + sigma**2))

    for sigma in (0.1, 0.5, 0.9):
        base, tuned, other = (log_density(*at, sigma) for at in ((0.0, 1.0), (1.0, 0.6), (-0.5, 0.8)))

        def velocity(density: torch.Tensor, sigma: float = sigma) -> torch.Tensor:
            [score] = grad(density.sum(), x, retain_graph=True)
            return -(x + sigma * score) / (1 - sigma)

        for weight in (0.0, 0.5, 1.0, 1.6):
            mixed = velocity((1 - weight) * base + weight * tuned)
            torch.testing.assert_close(weighed(velocity(base), (weight, velocity(tuned))), mixed)
        # several, which need not sum to 1
        mixed = velocity((1 - 1.6 - 0.5) * base + 1.6 * tuned + 0.5 * other)
        torch.testing.assert_close(weighed(velocity(base), (1.6, velocity(tuned)), (0.5, velocity(other))), mixed)


def test_several_loras_are_weighed_together(
    policy: DiffusersPolicy, tiny_policy: Callable[..., DiffusersPolicy], tmp_path: Path
) -> None:
    other = tiny_policy()
    # of another rank, on other layers
    other.add_lora(rank=2, alpha=2, targets=["to_q", "to_out.0"])
    for parameter in other.trainable().values():
        parameter.data.normal_(std=0.1)
    policy.save(tmp_path / "a"), other.save(tmp_path / "b")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    settings: dict[str, Any] = {"seeds": [3], "steps": 3, "guidance": 2.0}
    start = [own.sample(PROMPT, **settings).trajectory.velocity[:, 0] for own in (policy, other)]
    with policy.reference():
        base = policy.sample(PROMPT, **settings).trajectory.velocity[:, 0]
    expected = weighed(base, (1.6, start[0]), (-0.5, start[1]))
    plain = tiny_policy()
    for own, name in ((policy, "trained"), (policy, a), (plain, a)):
        begin = own.forwards
        made = own.sample(PROMPT, rlg={name: 1.6, b: -0.5}, **settings)
        torch.testing.assert_close(made.trajectory.velocity[:, 0], expected, atol=1e-5, rtol=0)
        assert own.forwards - begin == 3 * 2 * 3 and own.verify(made) < 1e-4
    # and everything is as it was
    assert torch.equal(policy.sample(PROMPT, **settings).trajectory.velocity[:, 0], start[0])
    assert torch.equal(plain.sample(PROMPT, **settings).trajectory.velocity[:, 0], base)
    assert sorted(policy.trainable()) and all("other" not in name for name in policy.trainable())
    one = policy.sample(PROMPT, rlg={"trained": 1.0}, **settings)
    torch.testing.assert_close(one.trajectory.velocity[:, 0], start[0], atol=1e-6, rtol=0)
    assert Engine(policy, JPEGSize(), PROMPT, Sampling(steps=3, rlg={a: 1.6, b: 0.5}, guidance=2.0)).unit == 6
    # an evaluation's own
    judged = [
        evaluate(own, JPEGSize(), Prompts([PROMPT], [{}]), Sampling(steps=3, rlg=rlg), 1, seed=3).value
        for own, rlg in ((policy, {a: 0.0}), (plain, 1.0), (policy, {a: 1.6, b: 0.5}))
    ]
    assert judged[0] == judged[1] != judged[2]
    with pytest.raises(ConfigError, match="rlg: no LoRA for this model at 'nowhere'"):
        policy.sample(PROMPT, rlg={"nowhere": 1.0}, **settings)
    with pytest.raises(ConfigError, match="'trained' is the LoRA of the model, and this model has none"):
        tiny_policy().sample(PROMPT, rlg={"trained": 2.0}, **settings)


def test_guidance_by_weights_needs_a_lora(tiny_policy: Callable[..., DiffusersPolicy]) -> None:
    with pytest.raises(ConfigError, match="rlg 1.6 weighs what a LoRA adds to its base, and this model has none"):
        tiny_policy().sample(PROMPT, steps=2, rlg=1.6)


def test_training_does_not_sample_by_weights() -> None:
    settings = load(recipe("tiny_sd3/flow_grpo"), ["rollout.rlg=1.6"])
    with pytest.raises(ConfigError, match="rollout.rlg: a run learns from the samples of its own weights"):
        settings.check(processes=1)


def test_noises_are_improved_by_the_gradient_through_the_pipeline(policy: DiffusersPolicy) -> None:
    given: dict[str, Any] = {"budget": "samples=13", "steps": 2, "progress": False, "guidance": 2.0}
    for method, settings in (("dno", {"learning_rate": 0.1}), ("nrg", {"strength": 1.0})):
        [found] = fa.find(policy, [PROMPT], "tiny_clip", method=method, settings=settings, **given)
        ends = [node.score for node in found.nodes if node.step == 2]
        plain = policy.sample(PROMPT, [0], steps=2, guidance=2.0).images
        start = TinyCLIP()(plain, [PROMPT], [{}]).value.item() if method == "nrg" else ends[0]
        assert found.score > start and 40 <= found.forwards <= 52
    assert all(parameter.grad is None for parameter in policy.trainable().values())


class Stops:
    """A reward that fails in its n-th call."""

    name = "stops"

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Any:
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return JPEGSize()(samples, prompts, metadata)


def test_an_interrupted_search_goes_on_and_finds_the_same(policy: DiffusersPolicy, tmp_path: Path) -> None:
    texts = [PROMPT, "one blue square", "a green triangle"]
    given: dict[str, Any] = {"method": "evosearch", "budget": "samples=6", "steps": 3, "progress": False}
    whole = fa.find(policy, texts, Stops(10**6), output=tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        fa.find(policy, texts, Stops(6), output=tmp_path / "parts", **given)
    lines = (tmp_path / "parts" / "tried.jsonl").read_text()
    assert 1 <= lines.count("\n") < 3
    # as if the machine had stopped while the next line was written
    (tmp_path / "parts" / "tried.jsonl").write_text(lines + '{"number": 1, "pro')
    begin = policy.forwards
    again = fa.find(policy, texts, Stops(10**6), output=tmp_path / "parts", **given)
    assert policy.forwards - begin == sum(one.forwards for one in whole[lines.count("\n") :])
    for one, other in zip(whole, again, strict=True):
        assert one.record() == other.record() and one.sample.tobytes() == other.sample.tobytes()
    with pytest.raises(ConfigError, match="parts holds a search with another budget; another output folder works"):
        fa.find(policy, texts, Stops(10**6), output=tmp_path / "parts", **given | {"budget": "samples=7"})


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["search", *arguments])
    return int(stopped.value.code or 0)


def test_the_command_compares_methods_and_writes_preferences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("two red circles\none blue square\n")
    methods = ["--method", "best_of_n", "--method", "fk_steering", "--set", "fk_steering.strength=5"]
    given = ["--reward", "shapes", "--budget", "samples=4", "--steps", "3", "--output", str(tmp_path / "found")]
    pairs = tmp_path / "to" / "pairs.jsonl"
    assert run("tiny_sd3", str(tmp_path / "prompts.txt"), *methods, *given, "--out", str(pairs)) == 0
    said = capsys.readouterr().out
    assert "best_of_n: shapes " in said and "fk_steering: shapes " in said and "12 forwards a prompt" in said
    tried = [json.loads(line) for line in (tmp_path / "found" / "tried.jsonl").read_text().splitlines()]
    assert [(line["number"], line["method"]) for line in tried] == [
        (number, method) for number in (0, 1) for method in ("best_of_n", "fk_steering")
    ]
    read = Preferences.read(str(pairs)).of_pictures()
    assert 1 <= len(read) <= 4 and set(read.texts) <= {"two red circles", "one blue square"}
    assert all(record["chosen_score"] > record["rejected_score"] for record in read.metadata)
    # a second time there is nothing left to do
    assert run("tiny_sd3", str(tmp_path / "prompts.txt"), *methods, *given) == 0
    assert len((tmp_path / "found" / "tried.jsonl").read_text().splitlines()) == 4
    store = SearchStore(tmp_path / "found")
    assert store.write_pairs(pairs, "shapes") == len(read)
    # a folder that somebody else made may name pictures elsewhere
    settings, line = json.loads((store.folder / "search.json").read_text()), tried[1]
    Image.new("RGB", (8, 8)).save(tmp_path / "private.png")
    for wrong, said in (
        ({"pictures": line["pictures"] | {"best": "../private.png"}}, "leads out of the folder"),
        ({"pictures": line["pictures"] | {"worst": str(tmp_path / "private.png")}}, "leads out of the folder"),
        ({"pictures": None}, "line 1: no search as flowalign keeps it"),
        ({"best": "x"}, "line 1: no search as flowalign keeps it"),
    ):
        store.lines.write_text(json.dumps(line | wrong) + "\n")
        for work in (lambda: store.open(settings), lambda: store.write_pairs(pairs, "shapes")):
            with pytest.raises(ConfigError, match=said):
                work()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--budget", "seconds=5", "--reward", "shapes"], "--budget seconds=5: give forwards=2000"),
        (["--budget", "forwards=3", "--reward", "shapes", "--steps", "4"], "smaller than one sample, which takes 4"),
        (["--method", "evosarch", "--reward", "shapes"], "did you mean 'evosearch'"),
        (["--set", "strengt=2", "--method", "fk_steering", "--reward", "shapes"], "did you mean 'strength'"),
        (["--set", "eta=3", "--method", "beam", "--reward", "shapes"], "at most 1"),
        ([], "--reward: name what to search for"),
        (["--reward", "group_diversity"], "a search compares samples one by one"),
        (["--reward", "shapes", "--rlg", "1.6"], "rlg 1.6 weighs what a LoRA adds"),
        (["--reward", "shapes", "--rlg", "much"], "--rlg much: give a weight such as 1.6, or LORA=WEIGHT"),
        (["--reward", "shapes", "--mask", "nowhere.png"], "--image FILE names the picture"),
        (["--reward", "shapes", "--method", "dno"], "dno follows the gradient of the reward, and 'shapes' has none"),
        (["--reward", "tiny_clip", "--method", "reno"], "reno is for models of one step, and 10 are asked for"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(
    given: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tiny_sd3", PROMPT, *given, "--output", str(tmp_path / "found")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("flowalign: ") and says in line
