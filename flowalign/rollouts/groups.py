"""The groups of a run's iterations: which are drawn, and which replace those without a learning signal."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowalign.core.seams import check_picks
from flowalign.data import Prompts
from flowalign.data.batches import Batch, draw_batch, draw_groups
from flowalign.data.selection.base import Selection
from flowalign.data.selection.replay import Replay, StoredGroup
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled, Sampler
from flowalign.rollouts.scoring import Scorer

AHEAD = 8
"""Iterations whose prompts are encoded together."""


class Groups:
    """Draws the groups of every iteration, and tells the selection how they fared.

    Args:
        selection: picks prompts, and gets the rewards of every group that was drawn, also of those that are replaced.
        sampler: samples the groups.
        scorer: scores the samples.
        processes: this process, among the others.
        branches: number of groups that an iteration makes of a prompt. They share a slot and are replaced together; a
            slot has a learning signal if one of its groups has spread.
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
        self.dynamic = config.data.dynamic_sampling
        settings = config.data.replay
        self.replay = Replay(settings.groups, settings.age) if settings is not None else None
        self.replayed_share = 0.0 if settings is None else settings.share
        self.replayed_until = None if settings is None else settings.until

    def picks(self, iteration: int, count: int | None = None, round: int = 0) -> list[int]:
        """Numbers of the prompts of an iteration's groups, of all processes; of so many, default as configured."""
        count = self.sampler.config.training.prompts_per_iteration if count is None else count
        picks = self.selection.picks(self.prompts, iteration, count, self.seed, round)
        return check_picks(f"data.selection: {type(self.selection).__name__}", picks, count, len(self.prompts))

    def coming(self) -> list[str]:
        """This process's prompts of the next iterations, as far as they are known now."""
        selection, training, processes = copy.deepcopy(self.selection), self.sampler.config.training, self.processes
        count = training.prompts_per_iteration
        share = slice(processes.row * count // processes.rows, (processes.row + 1) * count // processes.rows)
        picks = [selection.picks(self.prompts, i, count, self.seed)[share] for i in range(self.next, self.next + AHEAD)]
        return [self.prompts.texts[pick] for pick in itertools.chain.from_iterable(picks)]

    def draw(self, iteration: int, picks: list[int] | None = None) -> Draw:
        """This process's part of an iteration's groups.

        Args:
            picks: numbers of the prompts; default `picks`.
        """
        processes = self.processes
        picks, self.next = self.picks(iteration) if picks is None else picks, iteration + 1
        batch = draw_batch(
            self.prompts,
            iteration,
            len(picks),
            self.size,
            self.seed,
            self.sampler.shares_start_noise,
            processes.row,
            processes.rows,
            picks,
        )
        if self.dynamic is None and self.replay is None:
            return Draw(self.sampler, self.scorer, batch)
        return RefilledDraw(self, batch, picks)

    def learn(self, batch: Batch, reward: Tensor, gain: Tensor) -> None:
        """Tell the selection the mean rewards and advantages of an iteration's prompts, over all processes.

        Args:
            batch: this process's samples.
            reward: [B] rewards of the samples.
            gain: [B] mean sizes of their advantages.
        """
        gather, device = self.processes.gather, self.processes.device
        value, gain = (gather(column.to(device)) for column in (reward, gain))
        picks = gather(torch.tensor(batch.picks, device=device))
        # replayed groups, whose pick is below 0, tell nothing about the current weights
        numbers, index = picks[picks >= 0].unique(return_inverse=True)
        count = index.bincount()
        columns = [column[picks >= 0] for column in (value, gain)]
        means = [column.new_zeros(len(numbers)).index_add(0, index, column) / count for column in columns]
        self.selection.learn(numbers.tolist(), self.prompts, *(mean.tolist() for mean in means))

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file, and JSON."""
        extra: dict[str, Any] = {"selection": self.selection.state_dict()}
        if self.replay is None:
            return {}, extra
        tensors, extra["replay"] = self.replay.state()
        return {"replay": tensors}, extra

    def load_state(self, tensors: dict[str, dict[str, Tensor]], extra: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.selection.load_state_dict(extra["selection"])
        if self.replay is not None and "replay" in extra:
            self.replay.load_state(tensors["replay"], extra["replay"])


class RefilledDraw(Draw):
    """The groups of an iteration, where groups without spread, whose advantages are all 0, are replaced.

    Each prompt has a slot. Dynamic sampling (DAPO, arXiv 2503.14476): the slot of a group without spread, or of one
    whose mean reward is outside given bounds (arXiv 2504.03380), is drawn again with a further prompt, until every slot
    has a group to learn from or the rounds are used up. Replay: the slots that are left get groups of earlier
    iterations. The prompts and seeds of a slot do not depend on the number of processes.

    Args:
        picks: number of the prompt in every slot, over all processes.
    """

    def __init__(self, groups: Groups, batch: Batch, picks: list[int]) -> None:
        super().__init__(groups.sampler, groups.scorer, batch)
        self.groups, self.processes, self.first_picks = groups, groups.processes, picks
        self.current: dict[int, tuple[Sampled[Any, Any], int]]
        """Groups in each slot of this process: the samples that they are in, and the number of the prompt there."""

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        groups, dynamic, iteration = self.groups, self.groups.dynamic, self.batch.iteration
        self.picks, self.current = list(self.first_picks), {}
        yield from super().__iter__()
        self._fill(list(dict.fromkeys(self.batch.group)))
        drawn, rewards = 0, 0.0
        poor = list(range(len(self.picks)))
        for round in itertools.count(1):
            mean, spread = self._outcomes()
            drawn, rewards = drawn + len(poor), rewards + float(mean[poor].sum())
            poor = [slot for slot, teaches in enumerate(self._teach(mean, spread)) if not teaches]
            if not poor or dynamic is None or round == dynamic.rounds:
                break
            self._report(poor, mean)
            picks = groups.picks(iteration, len(poor), round)
            for slot, pick in zip(poor, picks, strict=True):
                self.picks[slot] = pick
            local = {slot: self.picks[slot] for slot in poor if slot in self.current}
            if local:
                yield self.split(
                    draw_groups(
                        groups.prompts,
                        iteration,
                        local,
                        groups.size,
                        groups.seed,
                        self.sampler.shares_start_noise,
                        round,
                    )
                )
                self._fill(list(local))
        self.metrics = {"groups/drawn": float(drawn), "groups/reward": rewards / drawn}
        if groups.replay is not None:
            poor = self._replay(poor, mean, spread)
        self.metrics["groups/poor"] = float(len(poor))

    def _fill(self, slots: list[int]) -> None:
        """Put the newest samples into these slots."""
        sampled = super().whole()
        self.current |= {slot: (sampled, i) for i, slot in enumerate(slots)}

    def _outcomes(self) -> tuple[Tensor, Tensor]:
        """Mean rewards [N] and standard deviations [N] of the slots of all processes; the largest of several groups."""
        shape = (-1, self.groups.branches, self.groups.size)
        rewards = torch.stack([sampled.scores.value.view(shape)[i] for sampled, i in self.current.values()])
        rewards = self.processes.gather(rewards.to(self.processes.device)).cpu()
        # the mean of equal rewards may differ from them by rounding
        alike = rewards.amax(2) == rewards.amin(2)
        return rewards.mean((1, 2)), rewards.std(2, correction=0).masked_fill(alike, 0.0).amax(1)

    def _teach(self, mean: Tensor, spread: Tensor) -> list[bool]:
        """True for each slot whose groups have a learning signal, and are kept."""
        dynamic = self.groups.dynamic
        teaches = spread > (dynamic.spread if dynamic else 0.0)
        if dynamic is not None and dynamic.low is not None:
            teaches &= mean >= dynamic.low
        if dynamic is not None and dynamic.high is not None:
            teaches &= mean <= dynamic.high
        return teaches.tolist()

    def _report(self, slots: list[int], mean: Tensor) -> None:
        """Tell the selection about groups that are replaced, as prompts without advantages."""
        picks = [self.picks[slot] for slot in slots]
        self.groups.selection.learn(picks, self.groups.prompts, mean[slots].tolist(), [0.0] * len(slots))

    def _replay(self, poor: list[int], mean: Tensor, spread: Tensor) -> list[int]:
        """Put stored groups into these slots, as many as there are, then store the new ones with a learning signal.

        Returns:
            the slots that are left.
        """
        replay, iteration, branches = self.groups.replay, self.batch.iteration, self.groups.branches
        assert replay is not None
        until = self.groups.replayed_until
        places = self._places(poor, spread) if until is None or iteration < until else []
        stored = replay.take(len(places), iteration, self.groups.seed)
        new = {slot: sampled for slot, sampled in self.current.items() if slot not in poor}
        fresh = [self._stored(*sampled, float(spread[slot])) for slot, sampled in new.items()]
        replay.put(self.processes.gather_objects(fresh))
        filled = places[: len(stored)]
        left = [slot for slot in poor if slot not in filled]
        self._report(filled, mean)
        for slot, group in zip(filled, stored, strict=True):
            if slot in self.current:
                batch = group.at(slot, iteration, branches)
                rollout = self.sampler.restore(group.tensors, group.rest, batch)
                self.current[slot] = (
                    Sampled(
                        rollout=rollout, batch=batch, scores=group.scores, sampler=self.sampler, scorer=self.scorer
                    ),
                    0,
                )
        self.metrics["groups/replayed"] = float(len(filled))
        return left

    def _places(self, poor: list[int], spread: Tensor) -> list[int]:
        """Slots for stored groups: those without a learning signal, then those with least spread up to the share."""
        most = int(self.groups.replayed_share * len(spread))
        others = [slot for slot in spread.argsort(stable=True).tolist() if slot not in poor]
        return poor + others[: max(most - len(poor), 0)]

    def _stored(self, sampled: Sampled[Any, Any], number: int, spread: float) -> StoredGroup:
        """The groups of one prompt, in the form in which they are stored."""
        rows = self._rows(number)
        members = torch.tensor(rows)
        tensors, extra = sampled.rollout[members.to(self.processes.device)].packed()
        tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
        return StoredGroup(
            tensors=tensors, rest=extra, batch=sampled.batch[rows], scores=sampled.scores[members], spread=spread
        )

    def _rows(self, number: int) -> list[int]:
        """Rows of the samples of a prompt."""
        block = self.groups.branches * self.groups.size
        return list(range(number * block, (number + 1) * block))

    def whole(self) -> Sampled[Any, Any]:
        """The groups in the order of their slots."""
        parts = list({id(sampled): sampled for sampled, _ in self.current.values()}.values())
        if len(parts) == 1:
            return replace(parts[0], metrics=self.metrics)
        firsts, rows = {}, 0
        for part in parts:
            firsts[id(part)] = rows
            rows += len(part.batch)
        order = [firsts[id(sampled)] + row for sampled, i in self.current.values() for row in self._rows(i)]
        joined = Sampled.cat(parts)
        return replace(
            joined,
            rollout=joined.rollout[torch.tensor(order, device=self.processes.device)],
            batch=joined.batch[order],
            scores=joined.scores[torch.tensor(order)],
            metrics=self.metrics,
        )
