"""A search in the place of a rollout's sampler: each sample to learn from is the best of a search of its own."""

import torch
from torch import Tensor

from flowalign.config.sections import RolloutSearch
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.scoring import Scorer
from flowalign.search.engine import Budget, Engine
from flowalign.search.run import build_methods, check_reward, check_steps
from samplers import derive_seed


class SearchSampler:
    """Finds the finished latents of a batch.

    Args:
        settings: the method and the budget of each sample.
        sampler: has the policy.
        scorer: has the reward that searches ask.

    Raises:
        ConfigError: a method, a budget or, when it is called, a reward that does not fit.
    """

    def __init__(self, settings: RolloutSearch, sampler: DiffusionSampler, scorer: Scorer) -> None:
        self.sampler, self.scorer = sampler, scorer
        self.name, self.budget = settings.name, Budget.parse(settings.budget)
        self.methods = build_methods([settings.name], settings.settings)
        if getattr(self.methods[self.name], "gradients", False):
            raise ConfigError(
                f"rollout.search: {self.name} follows gradients, which the weights that sample do not have; best_of_n "
                "or evosearch works"
            )

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """[B, ...] the best of each search; `search/gain` is by how much it is better than the first plain sample."""
        sampler, scorer = self.sampler, self.scorer
        sampling = sampler.config.rollout
        check_reward(self.methods, scorer.reward)
        check_steps(self.methods, sampling)
        best, gains = [], []
        for row, prompt in enumerate(batch.prompts):
            # start noises of its own, also where its neighbours' seeds follow each other
            seed = derive_seed(batch.seeds[row], batch.noise_seeds[row])
            [metadata] = scorer.metadata(batch, [row])
            engine = Engine(
                sampler.policy,
                scorer.reward,
                prompt,
                sampling,
                seed=seed,
                budget=self.budget,
                metadata=metadata,
                method=self.name,
            )
            self.methods[self.name](engine)
            if engine.best is None or engine.found.first is None:
                raise ConfigError(f"rollout.search: {self.name} keeps pictures, not latents; best_of_n works")
            best.append(engine.best)
            gains.append(engine.found.score - engine.found.first.score)
            scorer.calls += engine.found.reward_calls
        gain = scorer.processes.gather(torch.tensor(gains, device=sampler.device))
        sampler.metrics["search/gain"] = gain.mean().item()
        return torch.stack(best)
