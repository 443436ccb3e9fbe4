"""Every algorithm on the shipped tiny Stable Diffusion 3: one real iteration, and what each promises."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.algorithms.trajectory.branch_grpo import Pruning
from flowalign.algorithms.trajectory.tp_grpo import TPGRPO, TPGRPOSettings
from flowalign.config import load, recipe
from flowalign.core.credit import dense_rewards, turning_point_rewards
from flowalign.data.batches import Batch, draw_batch
from flowalign.errors import ConfigError
from flowalign.registry import names, resolve
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.sampler import Sampled
from flowalign.training import Trainer
from rewards import Scores, Spec, WeightedSum, as_reward
from samplers.completion import completions, path
from tests.flowalign.small_run import small_run

TRAJECTORY = [name for name in names("algorithms") if issubclass(resolve("algorithms", name), TrajectoryAlgorithm)]


def trainer(name: str, folder: Path, *overrides: str, **more: Any) -> Trainer:
    members = 8 if name == "branch_grpo" else 4
    return small_run(f"tiny_sd3/{name}", folder, f"training.group_size={members}", *overrides, **more)


def whole(run: Trainer, batch: Batch) -> SampledPictures:
    """The groups of a batch, sampled and scored."""
    rollout = run.sampler.rollout(batch)
    scores = run.scorer.score(run.sampler.decode(rollout), batch)
    return Sampled(rollout=rollout, batch=batch, scores=scores, sampler=run.sampler, scorer=run.scorer)


def test_every_algorithm_has_a_recipe_for_the_tiny_model():
    for name in names("algorithms"):
        model = {"pictures": "tiny_sd3", "text": "tiny_lm"}[resolve("algorithms", name).kind]
        if name == "omni_nft":
            # which trains pictures with a sound
            model = "ltx2"
        if name == "self_forcing":
            # which trains a causal video model
            model = "skyreels_v2"
        assert load(recipe(f"{model}/{name}")).algorithm.name == name


@pytest.mark.parametrize("name", TRAJECTORY)
def test_first_update_has_ratio_one_and_moves_the_weights(name: str, tmp_path: Path):
    run = trainer(name, tmp_path, "training.prompts_per_iteration=2")
    before = {key: value.detach().clone() for key, value in run.learner.parameters.items()}
    run.train()
    (metrics,) = run.metrics.read()
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/gradient_norm"] > 0
    assert any(not torch.equal(before[key], value) for key, value in run.learner.parameters.items())


def test_dense_rewards_telescope_to_the_whole_change(tmp_path: Path):
    run = trainer("dense_grpo", tmp_path)
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=False)
    sampled = whole(run, batch)
    rollout = sampled.rollout
    values = StateValues(Estimator())(sampled, run.processes)
    dense = dense_rewards(values)
    torch.testing.assert_close(dense.sum(1), values[:, -1] - values[:, 0], atol=1e-5, rtol=0)
    assert (dense[~rollout.trajectory.mask.cpu()] == 0).all()
    # the start noise is completed to the plain ODE sample
    made = completions(run.policy.at(rollout), rollout.trajectory)
    plain = run.sampler.rollout(batch, torch.zeros(run.config.rollout.steps)).trajectory.final
    torch.testing.assert_close(made.latents[made.index[:, 0]], plain, atol=1e-4, rtol=0)


def test_a_fitted_baseline_takes_off_what_lasts_of_the_value_before_a_step(tmp_path: Path):
    """By least squares of NumPy, on values less their groups' means."""
    run = trainer("dense_grpo", tmp_path, "algorithm={name: dense_grpo, baseline: fitted}")
    sampled = whole(run, draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=False))
    values = StateValues(Estimator())(sampled, run.processes)
    rewards = run.algorithm.step_reward(sampled, run.processes)
    centred = (values.view(2, 4, -1) - values.view(2, 4, -1).mean(1, keepdim=True)).view(8, -1).double().numpy()
    for k in range(values.shape[1] - 1):
        slope = np.polyfit(centred[:, k], centred[:, k + 1], 1)[0]
        torch.testing.assert_close(rewards[:, k], values[:, k + 1] - slope * values[:, k], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["n_step", "one_step", "learned"])
def test_estimators_report_their_agreement_with_the_exact_values(kind: str, tmp_path: Path):
    settings = f"{{name: dense_grpo, loss: {{clip_range: 0.01}}, estimator: {{kind: {kind}, check_every: 1}}}}"
    run = trainer("dense_grpo", tmp_path, f"algorithm={settings}")
    run.train()
    (metrics,) = run.metrics.read()
    assert "dense/bias/1" in metrics
    # the last state is scored, not estimated
    assert metrics["dense/bias/5"] == pytest.approx(0, abs=1e-6)


def test_single_step_credit_goes_to_the_step_that_branched(tmp_path: Path):
    run = trainer("g2rpo", tmp_path, "rollout.plan={name: single, start: 1, stop: 3}")
    batch = draw_batch(run.prompts, 0, 4, 4, 0, share_start_noise=True)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    mask = experience.rollout.trajectory.mask
    assert (mask.sum(1) == 1).all() and (experience.advantage[~mask] == 0).all()
    # four prompts, branches at two steps, four members: each group shares all but its own noise
    assert len(experience.batch) == 4 * 2 * 4
    steps = mask.float().argmax(1).view(8, 4)
    assert (steps == steps[:, :1]).all()
    # the metrics have the mean reward of the second granularity
    rollout, (rows, left) = experience.rollout, mask.nonzero().unbind(1)
    images = run.policy.decode_latents(rollout.whole(run.sampler.finish(rollout, rows, left + 1, 2), rows))
    scores = run.scorer.score(images, experience.batch).value
    assert experience.metrics["reward/stride/2"] == pytest.approx(scores.mean().item(), abs=1e-6)


def test_what_a_branch_has_been_asked_about_is_not_asked_again(tmp_path: Path):
    run = trainer("g2rpo", tmp_path, "rollout.plan={name: single, start: 1, stop: 3}")
    batch = draw_batch(run.prompts, 0, 4, 4, 0, share_start_noise=True)
    rollout, _ = run.algorithm.rollout(run.sampler, batch)
    trajectory, last = rollout.trajectory, run.config.rollout.steps
    rows, steps = trajectory.mask.nonzero().unbind(1)
    before = run.policy.forwards
    ends = run.sampler.finish(rollout, rows, steps + 1, 2)
    # of five steps those that left at the second go 2, 3, 5 and the others 3, 5
    assert run.policy.forwards == before
    for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
        x, sample, way = trajectory.latents[[row], step + 1], rows[[row]], path(step + 1, last, stride=2)
        for k, to in pairwise(way):
            v = run.policy.velocity(rollout, sample, torch.tensor([k]), x)
            x = x + v * (trajectory.sigmas[to] - trajectory.sigmas[k])
        torch.testing.assert_close(ends[[row]], x, atol=1e-4, rtol=0)
    before = run.policy.forwards
    run.policy.velocity(rollout, rows, steps)
    assert run.policy.forwards - before == 8


def test_noise_at_the_last_step_can_go_without_learning(tmp_path: Path):
    run = trainer("flow_grpo", tmp_path, "rollout.plan={name: all, last: noise}")
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=True)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    steps = run.config.rollout.steps
    rollout = experience.rollout
    assert rollout.trajectory.mask.all() and rollout.mask.sum(1).tolist() == [steps - 1] * 8
    assert set(experience.items[:, 1].tolist()) == set(range(steps - 1))
    assert len(experience.items) == 2 * run.algorithm.items(run.config)
    assert not experience.advantage[:, -1].any() and experience.advantage[:, -2].any()


def test_a_trees_edges_are_credited_and_pruned_as_the_authors_do(tmp_path: Path):
    """Their code normalises the nodes of a depth by torch's std + 1e-8, and leaves out depths and leaves after that."""
    run = trainer("branch_grpo", tmp_path)
    batch = draw_batch(run.prompts, 5, 1, 8, 0, share_start_noise=True)
    whole = run.collect(Draw(run.sampler, run.scorer, batch))
    run.algorithm.settings.pruning = Pruning(depths=[4, 5], every=2, stop=2, width="extremes", keep=0.25)
    part = run.collect(Draw(run.sampler, run.scorer, batch))
    rewards, nodes = whole.scores.value.tolist(), whole.rollout.trajectory.numbered().tolist()
    order = sorted(range(8), key=lambda leaf: -rewards[leaf])
    for step in range(len(nodes[0]) - 1):
        under: dict[int, list[int]] = {}
        for leaf in range(8):
            under.setdefault(nodes[leaf][step + 1], []).append(leaf)
        value = torch.tensor([sum(rewards[leaf] for leaf in leaves) / len(leaves) for leaves in under.values()])
        expected = (value - value.mean()) / (value.std() + 1e-8) if value.std() > 1e-6 else torch.zeros(len(value))
        for own, leaves in zip(expected.tolist(), under.values(), strict=True):
            for row, leaf in enumerate(leaves):
                # the first leaf of a node stands for it, and the last step has no noise
                trained = row == 0 and step < len(nodes[0]) - 2
                assert whole.advantage[leaf, step].item() == pytest.approx(own * trained, abs=1e-4)
                # in iteration 5 the depths have moved by two, the last split is step 2
                kept = step + 1 not in (2, 3) and (step <= 2 or leaf in (order[0], order[-1]))
                if kept:
                    assert part.advantage[leaf, step] == whole.advantage[leaf, step]
                elif step <= 2 or rewards[leaf] not in (rewards[order[0]], rewards[order[-1]]):
                    assert part.advantage[leaf, step] == 0


def test_pruned_depths_move_up_to_their_stop():
    pruning = Pruning(depths=[15, 16], every=30, stop=9)
    assert [pruning.pruned(i) for i in (0, 29, 30, 180, 900)] == [[15, 16], [15, 16], [14, 15], [9, 10], [9, 10]]
    assert Pruning(depths=[3]).pruned(99) == [3] and Pruning().pruned(5) == []


class Process:
    """One of several processes, each with its share of the rows."""

    device = "cpu"

    def __init__(self, values: torch.Tensor, index: int, rows: int):
        self.everything = {torch.float32: values, torch.bool: torch.ones_like(values[:, 1:], dtype=torch.bool)}
        self.rows = slice(index * rows, (index + 1) * rows)
        self.trajectory = SimpleNamespace(mask=self.everything[torch.bool][self.rows])

    def values(self, *_: object) -> torch.Tensor:
        return self.everything[torch.float32][self.rows]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        assert torch.equal(own, self.everything[own.dtype][self.rows])
        return self.everything[own.dtype]

    def own(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        assert self.rows.stop - self.rows.start == rows
        return values[self.rows]


def test_released_turning_points_do_not_depend_on_the_number_of_processes():
    algorithm = TPGRPO(TPGRPOSettings(variant="released"))
    values = torch.randn(12, 7) + torch.linspace(0, 1, 7)
    expected = turning_point_rewards(values, "released")
    shares = torch.cat([turning_point_rewards(own, "released") for own in values.split(4)])
    assert not torch.equal(shares, expected)
    for rows in (12, 4):
        processes = [Process(values, index, rows) for index in range(12 // rows)]
        made = []
        for each in processes:
            algorithm.values = each.values  # type: ignore[assignment]
            made.append(algorithm.step_reward(SimpleNamespace(rollout=each, batch=[None] * rows), each))  # type: ignore[arg-type]
        assert torch.equal(torch.cat(made), expected)


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("dense_grpo", "rollout.eta=0", "no stochastic step"),
        ("pref_grpo", "training.group_size=1", "group_size"),
        ("branch_grpo", "training.group_size=6", "8 leaves"),
        ("branch_grpo", "algorithm={name: branch_grpo, memory_limit_gb: 0.001}", "memory_limit_gb"),
        ("g2rpo", "rollout.plan={name: all}", "single"),
        ("mix_grpo", "rollout.plan={name: all}", "window"),
        ("mix_grpo", "rollout={sigmas: null, steps: 5, plan: {name: window}}", "sigmas"),
        ("dense_grpo", "algorithm={name: dense_grpo, estimator: {kind: ode, order: 2}}", "n_step"),
        ("tp_grpo", "algorithm={name: tp_grpo, variant: abstract}", "variant"),
        ("flow_grpo", "rollout={kernel: cps, eta: 1.5}", "eta"),
    ],
)
def test_impossible_combinations_are_refused_before_anything_loads(name: str, override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        flash = ["algorithm.flash=0.5"] if "sigmas: null" in override else []
        load(recipe(f"tiny_sd3/{name}"), [*flash, override]).check(processes=1)


def test_mix_grpo_flash_walks_fewer_steps_after_the_window(tmp_path: Path):
    sigmas = [1 - k / 10 for k in range(10)]
    window = ["rollout.steps=10", f"rollout.sigmas={sigmas}", "rollout.plan={name: window, start: 1, size: 2}"]
    run = trainer("mix_grpo", tmp_path, *window, "algorithm.flash=0.4", "rollout.share_start_noise=false")
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=False)
    rollout, _ = run.algorithm.rollout(run.sampler, batch)
    # steps 0, 1 and 2, then int(0.4 * 7) of the seven after the window
    assert rollout.trajectory.mask.tolist() == [[False, True, True, False, False]] * 8
    torch.testing.assert_close(rollout.trajectory.sigmas, torch.tensor([1, 0.9, 0.8, 0.7, 0.3, 0]))
    assert run.policy.forwards == 8 * 5
    run.policy.verify(rollout)
    # members that share their start noise go the same way
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=True)
    forked, _ = run.algorithm.rollout(run.sampler, batch)
    apart = run.policy.sample(
        batch.prompts,
        batch.seeds,
        noise_seeds=batch.noise_seeds,
        kernel=run.sampler.kernel,
        eta=rollout.trajectory.eta[0],
        **run.config.rollout.arguments([0, 1, 2, 3, 7]) | {"order": 2},
    )
    torch.testing.assert_close(forked.trajectory.latents, apart.trajectory.latents, atol=1e-4, rtol=0)
    # the tail is not Euler's, and the window's densities are those of any rollout
    euler = apart.trajectory.latents[:, 3] - 0.4 * apart.trajectory.velocity[:, 3]
    assert not torch.allclose(euler, apart.trajectory.latents[:, 4], atol=1e-3)
    rows, steps = apart.trajectory.mask.nonzero().unbind(1)
    scored = run.policy.score(apart, rows, steps).log_prob
    torch.testing.assert_close(scored, apart.trajectory.log_prob[rows, steps], atol=1e-5, rtol=0)


def test_shared_prefixes_change_nothing_but_the_cost(tmp_path: Path):
    run = trainer("short_flow_grpo", tmp_path)
    batch = draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=True)
    shared = run.sampler.rollout(batch).trajectory
    forwards = run.policy.forwards
    apart = run.policy.sample(
        batch.prompts,
        batch.seeds,
        noise_seeds=batch.noise_seeds,
        kernel=run.sampler.kernel,
        eta=run.sampler.etas(batch),
        **run.config.rollout.arguments(),
    ).trajectory
    torch.testing.assert_close(shared.latents, apart.latents, atol=1e-4, rtol=0)
    torch.testing.assert_close(shared.log_prob, apart.log_prob, atol=1e-5, rtol=0)
    assert torch.equal(shared.eta, apart.eta)
    # two groups up to the first stochastic step, the second, then all samples
    assert forwards == 2 * 2 + 8 * 3 and run.policy.forwards - forwards == 8 * 5


@pytest.mark.parametrize("name", TRAJECTORY)
def test_every_algorithm_has_a_valid_recipe_for_sd3(name: str):
    config = load(recipe(f"sd3/{name}"))
    assert config.algorithm.name == name
    config.check(processes=1)


class Doubtful:
    """A judge whose verdict on the first pair it is asked about cannot be read."""

    name, spec = "doubtful", Spec(kind="pairwise")

    def compare(self, first, second, prompts, metadata) -> Scores:
        unparsed = torch.zeros(len(first))
        unparsed[0] = 1
        return Scores(torch.where(unparsed > 0, 0.5, 1.0), {"unparsed": unparsed})


def test_unreadable_verdicts_of_pref_grpo_are_ties_and_reported(tmp_path: Path):
    run = trainer("pref_grpo", tmp_path, f"algorithm.judge={{name: '{__name__}:Doubtful'}}", "algorithm.schedule=all")
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 1, 4, 0, share_start_noise=True)))
    # the first of a pair wins, and the first pair is a tie: samples 0 and 1 met in it, and two others each
    assert experience.scores.parts["win_rate"].tolist() == pytest.approx([2.5 / 3, 2.5 / 3, 1 / 3, 0])
    assert experience.scores.parts["judge/unparsed"].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0])
    assert experience.metrics["reward/judge/unparsed"] == pytest.approx(1 / 6)


def test_the_win_rate_can_be_one_reward_of_several(tmp_path: Path):
    """.4 of it and .6 of another, by GDPO, as in Pref-GRPO's code: unbiased deviations, 1e-8 added to them."""
    rewards = [0.1, 0.5, 0.2, 0.9, 0.3, 0.3, 0.8, 0.4]
    other = WeightedSum([as_reward(lambda *_: rewards)], [0.6])
    chosen = [
        f"algorithm.judge={{name: '{__name__}:Doubtful'}}",
        "algorithm.win_rate_weight=0.4",
        "algorithm.advantage={name: gdpo, eps: 1.0e-8, unbiased: true}",
    ]
    run = trainer("pref_grpo", tmp_path, *chosen, reward=other)
    draw = Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 2, 4, 0, share_start_noise=True))
    experience = run.collect(draw)

    def standardised(values: torch.Tensor) -> torch.Tensor:
        return (values - values.mean(-1, keepdim=True)) / (values.std(-1, keepdim=True) + 1e-8)

    won = experience.scores.parts["win_rate"].view(2, 4)
    total = 0.4 * standardised(won) + 0.6 * standardised(torch.tensor(rewards).view(2, 4))
    earned = experience.advantage[experience.rollout.mask].view(8, -1)
    torch.testing.assert_close(earned, standardised(total.flatten())[:, None].expand_as(earned))
    torch.testing.assert_close(experience.reward, 0.4 * won.flatten() + 0.6 * torch.tensor(rewards))


def test_a_misspelt_setting_of_the_judge_is_found_before_anything_loads():
    with pytest.raises(ConfigError, match=r"algorithm\.judge: 'tiny_clip' has no setting 'batch_sise'"):
        load(recipe("tiny_sd3/pref_grpo"), ["algorithm.judge={name: tiny_clip, batch_sise: 3}"]).check(processes=1)
