"""The groups of a run's iterations: which are drawn, and what stands in for those that teach nothing."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowalign.core.seams import check_picks
from flowalign.data import Prompts
from flowalign.data.batches import Batch, draw_batch, draw_groups
from flowalign.data.selection.base import Selection
from flowalign.data.selection.replay import Replay, Stored
from flowalign.rollouts.draw import Draw, Workers
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled, Sampler
from flowalign.rollouts.scoring import Scorer

AHEAD = 8
"""Iterations whose prompts are encoded together."""


class Groups:
    """Draws the groups of every iteration, and tells the selection how they fared.

    Args:
        selection: picks prompts, and is told how every group fared that was drawn, whether kept or not.
        sampler: what samples them.
        scorer: what scores them.
        processes: this process, among the others.
        branches: groups that an iteration makes of a prompt. They are replaced together: a place is a prompt's, and
            teaches where one of its groups has spread.
    """

    def __init__(
        self,
        prompts: Prompts,
        selection: Selection,
        sampler: Sampler,
        scorer: Scorer,
        processes: Processes,
        branches: int = 1,
    ) -> None:
        self.prompts, self.selection, self.branches = prompts, selection, branches
        self.sampler, self.scorer, self.processes = sampler, scorer, processes
        config = sampler.config
        self.seed, self.size = config.training.seed, config.training.group_size
        self.next = 0
        """The iteration after the last one that was drawn."""
        # a text draws from its noise seed alone; a picture that is made of it starts from the start noise
        self.shares_start_noise = getattr(config.rollout, "share_start_noise", True)
        self.dynamic = config.data.dynamic_sampling
        settings = config.data.replay
        self.replay = Replay(settings.groups, settings.age) if settings is not None else None

    def picks(self, iteration: int) -> list[int]:
        """Numbers of the prompts of an iteration's groups, of all processes."""
        return self._picks(iteration, self.sampler.config.training.prompts_per_iteration)

    def _picks(self, iteration: int, count: int, round: int = 0) -> list[int]:
        picks = self.selection.picks(self.prompts, iteration, count, self.seed, round)
        return check_picks(f"data.selection: {type(self.selection).__name__}", picks, count, len(self.prompts))

    def coming(self) -> list[str]:
        """This process's prompts of the next iterations, as far as can be told now."""
        selection, training, processes = copy.deepcopy(self.selection), self.sampler.config.training, self.processes
        count = training.prompts_per_iteration
        share = slice(processes.row * count // processes.rows, (processes.row + 1) * count // processes.rows)
        picks = [selection.picks(self.prompts, i, count, self.seed)[share] for i in range(self.next, self.next + AHEAD)]
        return [self.prompts.texts[pick] for pick in itertools.chain.from_iterable(picks)]

    def draw(self, iteration: int, workers: Workers | None = None, picks: list[int] | None = None) -> Draw:
        """This process's part of an iteration's groups.

        Args:
            workers: other processes that sample them; None: this one does.
            picks: the prompts; default `picks`.
        """
        processes = self.processes
        picks, self.next = self.picks(iteration) if picks is None else picks, iteration + 1
        batch = draw_batch(
            self.prompts,
            iteration,
            len(picks),
            self.size,
            self.seed,
            self.shares_start_noise,
            processes.row,
            processes.rows,
            picks,
        )
        if self.dynamic is None and self.replay is None:
            return Draw(self.sampler, self.scorer, batch, workers)
        return RefilledDraw(self, batch, picks, workers)

    def learn(self, batch: Batch, reward: Tensor, gain: Tensor) -> None:
        """Tell the selection how an iteration's prompts fared, over all processes.

        Args:
            batch: this process's samples.
            reward: [B] of each.
            gain: [B] mean sizes of their advantages.
        """
        gather, device = self.processes.gather, self.processes.device
        value, gain = (gather(column.to(device)) for column in (reward, gain))
        picks = gather(torch.tensor(batch.picks, device=device))
        # what was replayed says nothing of the current weights
        numbers, index = picks[picks >= 0].unique(return_inverse=True)
        count = index.bincount()
        columns = [column[picks >= 0] for column in (value, gain)]
        means = [column.new_zeros(len(numbers)).index_add(0, index, column) / count for column in columns]
        self.selection.learn(numbers.tolist(), self.prompts, *(mean.tolist() for mean in means))

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


class RefilledDraw(Draw):
    """The groups of an iteration, of which those without spread, whose advantages are all 0, are replaced.

    Dynamic sampling (DAPO, arXiv 2503.14476): the place of a group without spread, or of one whose mean reward lies
    outside given bounds (arXiv 2504.03380), is drawn again with a further prompt, until every place has one to learn
    from or the rounds are used up. Replay: what is left then gets a group of an earlier iteration. Which prompts and
    seeds a place gets does not depend on the number of processes.

    Args:
        picks: number of the prompt of every place, over all processes.
    """

    def __init__(self, groups: Groups, batch: Batch, picks: list[int], workers: Workers | None = None) -> None:
        super().__init__(groups.sampler, groups.scorer, batch, workers)
        self.groups, self.processes, self.first_picks = groups, groups.processes, picks
        self.current: dict[int, tuple[Sampled[Any, Any], int]]
        """Groups of each prompt slot of this process: their samples, and the number of the prompt among these."""

    def __iter__(self) -> Iterator[tuple[Batch, Any]]:
        groups, dynamic, iteration = self.groups, self.groups.dynamic, self.batch.iteration
        self.picks, self.current = list(self.first_picks), {}
        yield from super().__iter__()
        self._fill(list(dict.fromkeys(self.batch.group)))
        drawn, rewards = 0, 0.0
        poor = list(range(len(self.picks)))
        for round in itertools.count(1):
            mean, spread = self._outcomes()
            drawn, rewards = drawn + len(poor), rewards + float(mean[poor].sum())
            poor = [place for place, teaches in enumerate(self._teach(mean, spread)) if not teaches]
            if not poor or dynamic is None or round == dynamic.rounds:
                break
            self._report(poor, mean)
            picks = groups._picks(iteration, len(poor), round)
            for place, pick in zip(poor, picks, strict=True):
                self.picks[place] = pick
            own = {place: self.picks[place] for place in poor if place in self.current}
            if own:
                yield from self._split(
                    draw_groups(
                        groups.prompts, iteration, own, groups.size, groups.seed, groups.shares_start_noise, round
                    )
                )
                self._fill(list(own))
        self.metrics = {"groups/drawn": float(drawn), "groups/reward": rewards / drawn}
        if groups.replay is not None:
            poor = self._replay(poor, mean, spread)
        self.metrics["groups/poor"] = float(len(poor))

    def _fill(self, places: list[int]) -> None:
        """Put what was just sampled into these places."""
        sampled = super().whole()
        self.current |= {place: (sampled, i) for i, place in enumerate(places)}

    def _outcomes(self) -> tuple[Tensor, Tensor]:
        """[N] mean rewards and [N] their standard deviations, of all processes; of several groups the largest."""
        shape = (-1, self.groups.branches, self.groups.size)
        rewards = torch.stack([sampled.scores.value.view(shape)[i] for sampled, i in self.current.values()])
        rewards = self.processes.gather(rewards.to(self.processes.device)).cpu()
        # equal rewards may have a mean that rounding sets apart from them
        alike = rewards.amax(2) == rewards.amin(2)
        return rewards.mean((1, 2)), rewards.std(2, correction=0).masked_fill(alike, 0.0).amax(1)

    def _teach(self, mean: Tensor, spread: Tensor) -> list[bool]:
        """Of each place, whether what it has is worth keeping."""
        dynamic = self.groups.dynamic
        kept = spread > (dynamic.spread if dynamic else 0.0)
        if dynamic is not None and dynamic.low is not None:
            kept &= mean >= dynamic.low
        if dynamic is not None and dynamic.high is not None:
            kept &= mean <= dynamic.high
        return kept.tolist()

    def _report(self, places: list[int], mean: Tensor) -> None:
        """Tell the selection of groups that are replaced, and so taught nothing."""
        picks = [self.picks[place] for place in places]
        self.groups.selection.learn(picks, self.groups.prompts, mean[places].tolist(), [0.0] * len(places))

    def _replay(self, poor: list[int], mean: Tensor, spread: Tensor) -> list[int]:
        """Put stored groups in these places, as many as there are, then store the new ones that teach.

        Returns:
            the places that are left.
        """
        replay, iteration, branches = self.groups.replay, self.batch.iteration, self.groups.branches
        assert replay is not None
        stored = replay.take(len(poor), iteration, self.groups.seed)
        new = {place: sampled for place, sampled in self.current.items() if place not in poor}
        fresh = [self._stored(*sampled, float(spread[place])) for place, sampled in new.items()]
        replay.put(self.processes.gather_objects(fresh))
        filled, left = poor[: len(stored)], poor[len(stored) :]
        self._report(filled, mean)
        for place, group in zip(filled, stored, strict=True):
            if place in self.current:
                batch = group.at(place, iteration, branches)
                rollout = self.sampler.restore(group.tensors, group.rest, batch)
                self.current[place] = (self._sampled(rollout, batch, group.scores), 0)
        self.metrics["groups/replayed"] = float(len(filled))
        return left

    def _stored(self, sampled: Sampled[Any, Any], number: int, spread: float) -> Stored:
        """The groups of one prompt, to be kept."""
        rows = self._rows(number)
        members = torch.tensor(rows)
        tensors, rest = sampled.rollout[members.to(self.processes.device)].packed()
        tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
        return Stored(
            tensors=tensors, rest=rest, batch=sampled.batch[rows], scores=sampled.scores[members], spread=spread
        )

    def _rows(self, number: int) -> list[int]:
        """Of the samples of a prompt."""
        block = self.groups.branches * self.groups.size
        return list(range(number * block, (number + 1) * block))

    def whole(self) -> Sampled[Any, Any]:
        """The groups in the order of their places."""
        parts = list({id(sampled): sampled for sampled, _ in self.current.values()}.values())
        if len(parts) == 1:
            return replace(parts[0], metrics=self.metrics)
        firsts, rows = {}, 0
        for part in parts:
            firsts[id(part)] = rows
            rows += len(part.batch)
        order = [firsts[id(sampled)] + row for sampled, i in self.current.values() for row in self._rows(i)]
        every = self._joined(parts)
        return replace(
            every,
            rollout=every.rollout[torch.tensor(order, device=self.processes.device)],
            batch=every.batch[order],
            scores=every.scores[torch.tensor(order)],
            metrics=self.metrics,
        )
