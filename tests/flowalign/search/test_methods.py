"""Methods of search on a Gaussian with a linear reward, where all is known in closed form."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.search import Engine, dno
from flowalign.search.beam import Beam
from flowalign.search.best_of_n import BestOfN
from flowalign.search.das import DAS
from flowalign.search.dno import DNO
from flowalign.search.dno import improbability as concentration
from flowalign.search.evosearch import EvoSearch, mutated
from flowalign.search.fk_steering import FKSteering, Potentials
from flowalign.search.nrg import NRG
from flowalign.search.reno import ReNO, improbability
from flowalign.search.ttsnap import TTSnap
from flowalign.search.weights import ParticleWeights, systematic
from samplers import KERNELS, All, normal, rollout, sample_ode, transition
from tests.flowalign.search.gaussian import chain, engine, velocity

SAMPLERS = [BestOfN(), FKSteering(), Beam(), EvoSearch(), TTSnap()]
METHODS = [*SAMPLERS, DNO(learning_rate=0.05), DNO(nearby=4, learning_rate=0.05), DAS(strength=10.0), NRG(strength=5.0)]


def plain(own: Engine, count: int) -> Tensor:
    """[count, ...] plain samples from the same start noises."""
    return sample_ode(velocity, engine(seed=own.seed).start(count).x, own.sigmas)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_method_uses_its_budget_and_no_more_and_repeats_itself(method: object) -> None:
    for budget in ("forwards=100", "reward_calls=30"):
        own, again = engine(budget, seed=3), engine(budget, seed=3)
        method(own), method(again)  # type: ignore[operator]
        kind, _, amount = budget.partition("=")
        used = getattr(own.found, kind)
        assert 0.6 * int(amount) <= used <= int(amount)
        assert own.found.record() == again.found.record()
        assert own.found.score == max(n.score for n in own.found.nodes if n.step == own.steps)
        assert own.found.score >= own.found.first.score
        assert [score for _, score in own.found.curve][-1] == own.found.score


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_budget_of_one_sample_samples_plainly(method: object) -> None:
    guided = isinstance(method, DAS | NRG)
    # their gradients cost three times as much, and have no strength here
    method = replace(method, strength=0.0) if guided else method
    own = engine("samples=3" if guided else "samples=1", seed=5)
    method(own)  # type: ignore[operator]
    noisy = isinstance(method, FKSteering | Beam | DNO | DAS)
    start, eta = engine(seed=5).start(1).x, All().etas(6, 0.7, 0, 0)
    seeds = [source.initial_seed() for source in own.noise(1)]
    at = lambda x, sigma: velocity(x, sigma)  # noqa: E731
    expected = rollout(at, start, own.sigmas, KERNELS["cps"], eta, seeds).final if noisy else plain(own, 1)
    assert torch.equal(own.found.sample[None], expected) and own.found.forwards == own.steps * (3 if guided else 1)
    with pytest.raises(ConfigError, match="budget forwards=5 is smaller than one sample, which takes (6|18) forwards"):
        method(engine("forwards=5"))  # type: ignore[operator]


def test_best_of_n_takes_the_best_of_plain_samples() -> None:
    own = engine("samples=40", batch_size=16)
    BestOfN()(own)
    scores = plain(own, 40).flatten(1).mean(1)
    torch.testing.assert_close(torch.tensor([n.score for n in own.found.nodes]), scores)
    assert own.found.best.node == int(scores.argmax()) and own.found.worst.node == int(scores.argmin())


def test_steering_without_strength_samples_plainly() -> None:
    own = engine("samples=8")
    FKSteering(strength=0)(own)
    seeds = [source.initial_seed() for source in own.noise(8)]
    eta = All().etas(6, 0.7, 0, 0)
    expected = rollout(velocity, engine().start(8).x, own.sigmas, KERNELS["cps"], eta, seeds).final
    ends = torch.tensor([node.score for node in own.found.nodes if node.step == 6])
    assert torch.equal(ends, torch.stack([sample.mean() for sample in expected]))


@pytest.mark.parametrize("potential", ["diff", "max", "add", "rt"])
def test_the_potentials_of_a_path_multiply_to_the_tilt_of_its_end(potential: str) -> None:
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    own, product = Potentials.begin(potential, 7), torch.zeros(7)  # type: ignore[arg-type]
    for k, score in enumerate(scores):
        log, own = own.next(potential, 2.5, score, last=k == 4)  # type: ignore[arg-type]
        product = product + log
    torch.testing.assert_close(product, 2.5 * scores[-1])
    # on the way: what the published potentials are
    first, _ = Potentials.begin(potential, 7).next(potential, 2.5, scores[0])  # type: ignore[arg-type]
    torch.testing.assert_close(first, 2.5 * scores[0])


@pytest.mark.parametrize(
    ("potential", "below"), [("diff", 1.0), ("diff", 0.5), ("max", 1.0), ("add", 0.5), ("rt", 0.8)]
)
def test_weights_estimate_the_mean_of_the_tilt_without_bias(potential: str, below: float) -> None:
    strength, eta = 2.0, 0.7
    method = FKSteering(strength=strength, potential=potential, below=below, eta=eta)  # type: ignore[arg-type]
    estimates = []
    for seed in range(150):
        own = engine("samples=8", seed=1000 * seed)
        method(own)
        assert own.found.log_mean is not None
        estimates.append(math.exp(own.found.log_mean))
    values = torch.tensor(estimates)
    mean, variance = chain("cps", eta)
    # the mean of four independent elements
    expected = math.exp(strength * mean + strength**2 * variance / 4 / 2)
    error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - expected) < 3 * error
    # and not because the error is large: exp(strength * mean) would be noticed
    assert expected - math.exp(strength * mean) > 4 * error


@pytest.mark.parametrize("below", [0.5, 1.0])
def test_weights_make_up_for_a_gradient_that_moves_the_particles(below: float) -> None:
    strength = 2.0
    estimates = []
    for seed in range(60):
        own = engine("samples=24", seed=1000 * seed)
        DAS(strength=strength, below=below)(own)
        assert own.found.log_mean is not None
        estimates.append(math.exp(own.found.log_mean))
    values, (mean, variance) = torch.tensor(estimates), chain("cps", 0.7)
    expected = math.exp(strength * mean + strength**2 * variance / 8)
    error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - expected) < 3 * error < 0.1 * expected


def test_a_particle_drifts_by_the_tempering_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the authors' code (approx_guidance times min_scale_next, das/diffusers_patch/pipeline_using_SMC.py)."""
    own, method = engine("samples=3", steps=3), DAS(particles=1, strength=2.0, gamma=0.5, below=0.0)
    seen: list[Tensor] = []
    slope = Engine.slope
    monkeypatch.setattr(Engine, "slope", lambda self, p: (seen.append(p.x), slope(self, p))[1])
    method(own)
    sources = own.noise(1)
    # the second draw
    noise = [normal((1, 2, 2), sources, "cpu") for _ in range(2)][1]
    x, sigma, to = seen[1], own.sigmas[1:2], own.sigmas[2:3]
    plain = transition(KERNELS["cps"], x, velocity(x, sigma), sigma, to, torch.tensor([0.7]), noise=noise)
    # lambda is 0, 0.5 and then 1
    slope_of_x0 = torch.func.jacrev(lambda x: (x - sigma * velocity(x, sigma)).mean())(x)
    assert plain.std.max() * slope_of_x0.max() > 0.01
    torch.testing.assert_close(seen[2], plain.next + plain.std**2 * 1.0 * 2.0 * slope_of_x0)


def test_along_the_ode_the_start_noise_alone_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """And held to be probable, as in the authors' code (compute_probability_regularization with eta 0)."""
    sizes = []
    monkeypatch.setattr(dno, "improbability", lambda noise: (sizes.append(len(noise)), noise.square().sum())[1])
    own = engine("samples=7")
    DNO(eta=0.0, learning_rate=0.05, regularization=0.1)(own)
    assert set(sizes) == {4} and own.found.score > own.found.first.score


def test_the_reward_comes_in_step_by_step() -> None:
    assert DAS().tempering(5)[0] == 0 and DAS().tempering(5)[-2:] == pytest.approx([1.0, 1.0])
    assert DAS(gamma=0.008).tempering(50)[49] == pytest.approx(1.008**49 - 1)
    assert DAS(gamma=1.0).tempering(5) == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_guidance_by_the_gradient_samples_the_tilted_gaussian() -> None:
    """A linear reward shifts the Gaussian by strength * variance * slope."""
    own, strength = engine("forwards=1000000", steps=60, batch_size=500), 4.0
    NRG(n=500, strength=strength)(own)
    plain = sample_ode(velocity, engine(steps=60).start(500).x, own.sigmas).flatten(1).mean(1)
    ends = torch.tensor([node.score for node in own.found.nodes if node.step == 60])
    # of the mean of four elements each has a quarter of the slope; where samples start does not matter
    torch.testing.assert_close(ends - plain, torch.full((500,), strength * 0.8**2 / 4), rtol=0.1, atol=0)


@pytest.mark.parametrize("method", METHODS[5:], ids=lambda method: repr(method)[:14])
def test_gradients_find_more_than_plain_sampling(method: object) -> None:
    own, plain = engine("samples=60", seed=1), engine("samples=60", seed=1)
    method(own)  # type: ignore[operator]
    kind, change = (DNO, {"iterations": 1}) if isinstance(method, DNO) else (type(method), {"strength": 0.0})
    assert isinstance(method, kind)
    replace(method, **change)(plain)  # type: ignore[operator,type-var,arg-type]
    assert own.found.score > plain.found.score + 0.2


def test_one_step_noises_are_improved_and_stay_probable() -> None:
    loose, tied = engine("forwards=300", steps=1), engine("forwards=300", steps=1)
    for own in (loose, tied):
        # a model that halves its noise
        own.policy.velocity = lambda rollout, rows, steps, x: x / 2  # type: ignore[method-assign,misc,assignment]
    ReNO(learning_rate=1.0, regularization=0.0)(loose)
    ReNO(learning_rate=1.0, regularization=10.0)(tied)
    scores = [node.score for node in loose.found.nodes]
    assert len(scores) == 100 and loose.found.forwards == 298
    # uphill all the way: nothing but a straight line is in the way of this reward
    assert scores == sorted(scores) and tied.found.score < loose.found.score
    # what is least improbable is a norm of sqrt(d - 1)
    norms = torch.linspace(0.5, 4, 351)
    values = torch.stack([improbability(torch.full((4,), float(norm) / 2)) for norm in norms])
    assert float(norms[values.argmin()]) == pytest.approx(3**0.5, abs=0.01)


def test_noises_that_are_no_noise_are_improbable() -> None:
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    plain = concentration(noise)
    for changed in (noise + 0.3, noise * 1.5):
        assert concentration(changed) > plain + 3
    # of one order alone, by the authors' code (compute_probability_regularization of dno_stable_diffusion.py): the sum
    # of its two logarithms for this ramp in blocks of 4^2
    ramp = torch.linspace(-1.5, 2, 4096)
    assert float(concentration(ramp, permutations=0)) == pytest.approx(1095.096, rel=1e-5)


def test_weights_are_carried_where_nothing_is_resampled() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = ParticleWeights(4)
    weights.add(torch.tensor([0.1, 0.0, 0.0, 0.1]))
    assert weights.resample(0.5, generator) is None
    weights.add(torch.tensor([5.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(weights.log, torch.tensor([5.1, 0.0, 0.0, 0.1], dtype=torch.float64))
    expected = math.log((math.exp(5.1) + 2 + math.exp(0.1)) / 4)
    assert weights.log_mean == pytest.approx(expected) and weights.ess < 1.1
    rows = weights.resample(0.5, generator)
    assert rows is not None and rows.tolist().count(0) >= 3
    assert weights.ess == pytest.approx(4) and weights.log_mean == pytest.approx(expected)


def test_the_comb_draws_as_often_as_the_weights_say() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.5, 0.26, 0.0, 0.24])
    counts = torch.stack([systematic(shares, generator).bincount(minlength=4) for _ in range(400)]).float()
    assert (counts >= (4 * shares).floor()).all() and (counts <= (4 * shares).ceil()).all()
    torch.testing.assert_close(counts.mean(0), 4 * shares, atol=0.06, rtol=0)
    assert systematic(torch.full((5,), 0.2), generator).tolist() == [0, 1, 2, 3, 4]


def test_mutation_keeps_the_variance_of_the_start_noise() -> None:
    start, noise = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    for rate in (0.0, 0.2, 0.7, 1.0):
        child = mutated(start, noise, rate)
        assert child.std() == pytest.approx(1, abs=0.01)
        assert torch.corrcoef(torch.stack([start, child]))[0, 1] == pytest.approx((1 - rate**2) ** 0.5, abs=0.01)


def test_a_child_on_the_way_shares_its_parents_states_and_then_leaves_by_one_noisy_step() -> None:
    own = engine("samples=20")
    method = EvoSearch(at=[0.5])
    method(own)
    nodes = own.found.nodes
    first = [node for node in nodes if node.parent is None]
    children = [node for node in nodes if node.parent is not None]
    assert len(children) == len(first) // 2 and all(node.step == 6 for node in nodes)
    # states of the second half only were computed for the children, whose first velocity was known
    assert own.found.forwards == 6 * len(first) + 2 * len(children)
    assert all(nodes[node.parent].score >= sorted(n.score for n in first)[-4] for node in children)


def test_pruning_finishes_only_what_promises_most() -> None:
    # as published: of 100 at steps 2, 6 and 11 of 20
    assert sorted(set(TTSnap(at=[0.1, 0.3, 0.55], keep=[0.4, 0.4, 0.5]).sizes(100, 20))) == [8, 16, 40, 100]
    own = engine("forwards=10000")
    TTSnap(starts=16, at=[0.34, 0.67], keep=0.25)(own)
    by_step = {k: [n for n in own.found.nodes if n.step == k] for k in (2, 4, 6)}
    assert [len(nodes) for nodes in by_step.values()] == [16, 4, 1]
    assert own.found.forwards == 3 * 16 + 2 * 4 + 1
    for k in (2, 4):
        kept = sorted(n.score for n in by_step[k] if n.kept)
        assert min(kept) >= max(n.score for n in by_step[k] if not n.kept)
    assert [own.found.nodes[n].step for n in own.found.path()] == [2, 4, 6]


def test_a_beam_continues_the_best_with_noise_of_their_own() -> None:
    own = engine("forwards=10000")
    Beam(width=8, children=4)(own)
    nodes = own.found.nodes
    for k in range(1, 6):
        parents = {node.parent for node in nodes if node.step == k}
        ranked = sorted((n for n in range(len(nodes)) if nodes[n].step == k - 1), key=lambda n: -nodes[n].score)
        assert parents == set(ranked[:2])
        assert len({node.score for node in nodes if node.step == k}) == 8
    assert sum(node.step == 6 for node in nodes) == 2


def test_states_of_different_steps_share_network_batches_and_end_where_the_loop_ends() -> None:
    own = engine(batch_size=16)
    step = torch.tensor([0, 2, 2, 5])
    x = torch.randn(4, 1, 2, 2)
    ends = own.finish(own.particles(x, step)).x
    assert own.policy.batches == [[0, 2, 2, 5], [1, 3, 3], [2, 4, 4], [3, 5, 5], [4], [5]]  # type: ignore[attr-defined]
    for row, k in enumerate(step.tolist()):
        torch.testing.assert_close(ends[row : row + 1], sample_ode(velocity, x[row : row + 1], own.sigmas[k:]))
    walked = own.walk(own.trajectories(x[:2]), torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(walked.final, sample_ode(velocity, x[:2], own.sigmas))
    torch.testing.assert_close(walked.latents[:, 3] + walked.velocity[:, 3] * -1 / 6, walked.latents[:, 4])


def test_no_more_states_or_pictures_are_held_than_a_batch_and_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    own, decoded = engine("samples=50", batch_size=8), []
    plain = own.policy.decode_latents
    monkeypatch.setattr(own.policy, "decode_latents", lambda x, size: decoded.append(len(x)) or plain(x, size))
    for method in (BestOfN(), TTSnap(), EvoSearch(), FKSteering()):
        own.found = replace(own.found, nodes=[], forwards=0, reward_calls=0)
        method(own)
    assert len(decoded) > 40 and max(decoded) <= 8
    assert max(map(len, own.policy.batches)) <= 8  # type: ignore[attr-defined]


def test_search_finds_more_than_plain_sampling() -> None:
    best = {}
    for method in SAMPLERS:
        scores = []
        for seed in range(10):
            own = engine("samples=24", seed=100 * seed)
            method(own)  # type: ignore[operator]
            scores.append(own.found.score)
        best[type(method).__name__] = sum(scores) / len(scores)
    mean, variance = chain("ode", 0.0)
    # each is better than plain samples on average by more than 1.2 standard deviations of a sample's reward
    assert all(score > mean + 1.2 * (variance / 4) ** 0.5 for score in best.values()), best


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (FKSteering, {"eta": 2.0}, "eta is 2; with this kernel it is at most 1"),
        (FKSteering, {"resamplings": 0}, "at least 1"),
        (Beam, {"children": 1}, "1 children are no choice"),
        (BestOfN, {"n": 0}, "it is at least 1"),
        (TTSnap, {"at": [0.5, 0.2]}, "increases"),
        (TTSnap, {"at": [0.2, 0.5], "keep": [0.5]}, "or one for each"),
        (EvoSearch, {"at": [1.0]}, "from 0 to below 1"),
        (EvoSearch, {"mutation": 2.0}, "from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(**settings)
