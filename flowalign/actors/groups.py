"""The groups of an iteration: which are drawn, and what stands in for those that teach nothing."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.algorithms.base import Experience
from flowalign.config import BaseConfig
from flowalign.data import Batch, Prompts, draw_batch, draw_groups
from flowalign.selection import Replay, Selection, Stored
from rewards import Scores

if TYPE_CHECKING:
    from flowalign.actors.worker import Worker

Made = tuple[Any, Batch, Scores]
"""a rollout, the samples it is of, and their scores"""


class Groups:
    """Draws groups, and replaces those without spread, whose advantages are all 0.

    Dynamic sampling (DAPO, arXiv 2503.14476): the place of a group without spread, or of one whose mean reward lies
    outside given bounds (arXiv 2504.03380), is drawn again with a further prompt, until every place has one to learn
    from or the rounds are used up. Replay: what is left then gets a group of an earlier iteration. Which prompts and
    seeds a place gets does not depend on the number of processes.

    Args:
        selection: picks prompts, and is told how every group fared that was drawn, whether kept or not.
        worker: this process's, among the others.
        branches: groups that an iteration makes of a prompt. They are replaced together: a place is a prompt's, and
            teaches where one of its groups has spread.
    """

    def __init__(
        self, config: BaseConfig, prompts: Prompts, selection: Selection, worker: "Worker", branches: int = 1
    ) -> None:
        self.config, self.prompts, self.selection, self.worker = config, prompts, selection, worker
        self.seed, self.size, self.branches = config.training.seed, config.training.group_size, branches
        # a text draws from its noise seed alone; the start noise is that of a picture made of it
        self.shares_start_noise = getattr(config.rollout, "share_start_noise", True)
        settings = config.data.replay
        self.replay = Replay(settings.groups, settings.age) if settings is not None else None
        self.picks: list[int] = []
        """number of the prompt of every group of this iteration, over all processes"""

    def draw(self, iteration: int) -> Batch:
        """This process's part of an iteration's groups."""
        count = self.config.training.prompts_per_iteration
        self.picks = self.selection.picks(self.prompts, iteration, count, self.seed)
        return draw_batch(
            self.prompts,
            iteration,
            count,
            self.size,
            self.seed,
            self.shares_start_noise,
            self.worker.accelerator.process_index,
            self.worker.accelerator.num_processes,
            self.picks,
        )

    def refilled(self, made: Made, again: Callable[[Batch], Made]) -> Made:
        """The groups of this iteration, replaced where they teach nothing and something else can be had.

        Args:
            made: whole groups, as drawn.
            again: samples and scores a batch.
        """
        dynamic = self.config.data.dynamic_sampling
        if dynamic is None and self.replay is None:
            return made
        iteration = made[1].iteration
        slots = dict.fromkeys(number // self.branches for number in made[1].group)
        current = {slot: (made, i) for i, slot in enumerate(slots)}
        """of each place its groups: what they were made with, and as those of which prompt of that"""
        drawn, rewards = 0, 0.0
        poor = list(range(self.config.training.prompts_per_iteration))
        for round in itertools.count(1):
            mean, spread = self._outcomes(current)
            drawn, rewards = drawn + len(poor), rewards + float(mean[poor].sum())
            poor = [slot for slot, teaches in enumerate(self._teach(mean, spread)) if not teaches]
            if not poor or dynamic is None or round == dynamic.rounds:
                break
            self._tell(poor, mean)
            picks = self.selection.picks(self.prompts, iteration, len(poor), self.seed, round)
            for slot, pick in zip(poor, picks, strict=True):
                self.picks[slot] = pick
            own = {slot: self.picks[slot] for slot in poor if slot in current}
            if own:
                batch = draw_groups(self.prompts, iteration, own, self.size, self.seed, self.shares_start_noise, round)
                part = again(batch)
                current |= {slot: (part, i) for i, slot in enumerate(own)}
        self.worker.metrics |= {"groups/drawn": float(drawn), "groups/reward": rewards / drawn}
        if self.replay is not None:
            poor = self._replayed(current, poor, mean, spread, iteration)
        self.worker.metrics["groups/poor"] = float(len(poor))
        return self._joined(current)

    def _outcomes(self, current: dict[int, tuple[Made, int]]) -> tuple[Tensor, Tensor]:
        """[N] mean rewards and [N] their standard deviations, of all processes; of several groups the largest."""
        rewards = torch.stack([made[2].value.view(-1, self.branches, self.size)[i] for made, i in current.values()])
        rewards = self.worker.gather(rewards.to(self.worker.device)).cpu()
        # equal rewards may have a mean that rounding sets apart from them
        alike = rewards.amax(2) == rewards.amin(2)
        return rewards.mean((1, 2)), rewards.std(2, correction=0).masked_fill(alike, 0.0).amax(1)

    def _teach(self, mean: Tensor, spread: Tensor) -> list[bool]:
        """Of each place, whether what it has is worth keeping."""
        dynamic = self.config.data.dynamic_sampling
        kept = spread > (dynamic.spread if dynamic else 0.0)
        if dynamic is not None and dynamic.low is not None:
            kept &= mean >= dynamic.low
        if dynamic is not None and dynamic.high is not None:
            kept &= mean <= dynamic.high
        return kept.tolist()

    def _tell(self, slots: list[int], mean: Tensor) -> None:
        """Tell the selection of groups that are replaced, and so taught nothing."""
        picks = [self.picks[slot] for slot in slots]
        self.selection.learn(picks, self.prompts, mean[slots].tolist(), [0.0] * len(slots))

    def _replayed(
        self, current: dict[int, tuple[Made, int]], poor: list[int], mean: Tensor, spread: Tensor, iteration: int
    ) -> list[int]:
        """Put stored groups in these places, as many as there are, then store the new ones that teach.

        Returns:
            the places that are left.
        """
        assert self.replay is not None
        taken = self.replay.take(len(poor), iteration, self.seed)
        fresh = [self._stored(made, i, float(spread[slot])) for slot, (made, i) in current.items() if slot not in poor]
        self.replay.put(gather_object(fresh))
        filled, left = poor[: len(taken)], poor[len(taken) :]
        self._tell(filled, mean)
        for slot, stored in zip(filled, taken, strict=True):
            if slot in current:
                batch = stored.at(slot, iteration, self.branches)
                current[slot] = ((self.worker.unpacked(stored.tensors, stored.rest, batch), batch, stored.scores), 0)
        self.worker.metrics["groups/replayed"] = float(len(filled))
        return left

    def _stored(self, made: Made, place: int, spread: float) -> Stored:
        """What an iteration made of one prompt, to be kept."""
        rollout, batch, scores = made
        rows = self._rows(place)
        members = torch.tensor(rows)
        tensors, rest = rollout[members.to(self.worker.device)].packed()
        tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
        return Stored(tensors, rest, batch[rows], scores[members], spread)

    def _rows(self, place: int) -> list[int]:
        """Of the samples of that prompt."""
        block = self.branches * self.size
        return list(range(place * block, (place + 1) * block))

    def _joined(self, current: dict[int, tuple[Made, int]]) -> Made:
        """One rollout of the groups, in the order of their places."""
        parts = list({id(made): made for made, _ in current.values()}.values())
        if len(parts) == 1:
            return parts[0]
        firsts, rows = {}, 0
        for part in parts:
            firsts[id(part)] = rows
            rows += len(part[1])
        order = [firsts[id(made)] + row for made, i in current.values() for row in self._rows(i)]
        rollouts, batches, scores = zip(*parts, strict=True)
        rollout = self.worker.joined(rollouts)[torch.tensor(order, device=self.worker.device)]
        return rollout, Batch.cat(batches)[order], Scores.cat(scores)[torch.tensor(order)]

    def learn(self, experience: Experience) -> None:
        """Tell the selection how this iteration's prompts fared, over all processes."""
        outcome = experience.outcome()
        if outcome is None:
            return
        value, gain = (self.worker.gather(column.to(self.worker.device)) for column in outcome)
        picks = self.worker.gather(torch.tensor(experience.batch.picks, device=self.worker.device))
        # what was replayed says nothing of the weights of now
        numbers, index = picks[picks >= 0].unique(return_inverse=True)
        count = index.bincount()
        columns = [column[picks >= 0] for column in (value, gain)]
        means = [column.new_zeros(len(numbers)).index_add(0, index, column) / count for column in columns]
        self.selection.learn(numbers.tolist(), self.prompts, *(mean.tolist() for mean in means))

    # For the checkpoint

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file, and JSON."""
        rest: dict[str, Any] = {"selection": self.selection.state_dict()}
        if self.replay is None:
            return {}, rest
        tensors, rest["replay"] = self.replay.state()
        return {"replay": tensors}, rest

    def load_state(self, tensors: dict[str, dict[str, Tensor]], rest: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.selection.load_state_dict(rest["selection"])
        if self.replay is not None and "replay" in rest:
            self.replay.load_state(tensors["replay"], rest["replay"])
