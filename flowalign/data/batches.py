"""The batches that an iteration trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowalign.data.prompts import Prompts
from flowalign.data.sizes import rows_by_size
from samplers import derive_seed
from samplers.rows import Rows


@dataclass(kw_only=True)
class Batch(Rows):
    """The samples one process makes in an iteration: whole groups, members side by side."""

    prompts: list[str]
    metadata: list[dict[str, Any]]
    group: list[int]
    """Group number of each sample, the same on every process layout."""
    seeds: list[int]
    """Seeds of the start noise."""
    noise_seeds: list[int]
    """Seeds of the step noise, or of a text's draws."""
    iteration: int
    picks: list[int]
    """Number of each sample's prompt in the list it was drawn from; -1: not drawn in this iteration."""

    @property
    def shares_start_noise(self) -> bool:
        """Whether the members of each group start from the same noise."""
        return len(set(zip(self.group, self.seeds, strict=True))) == len(set(self.group))

    @property
    def pooled(self) -> list[int]:
        """A number for each sample's prompt: groups of one prompt that were drawn in this iteration have the same."""
        return [pick if pick >= 0 else -1 - group for pick, group in zip(self.picks, self.group, strict=True)]

    def split(self, parts: int) -> list["Batch"]:
        """Parts of whole groups, as equal as can be."""
        shares = np.array_split(np.array(list(dict.fromkeys(self.group))), parts)
        return [self[np.flatnonzero(np.isin(self.group, share)).tolist()] for share in shares]

    def cut(self, starts: Sequence[int]) -> list["Batch"]:
        """Parts that begin at these rows, of which the first is 0."""
        ends = [*starts[1:], len(self)]
        return [self[list(range(start, end))] for start, end in zip(starts, ends, strict=True)]

    def starts(self, size: int) -> list[int]:
        """Rows where a group begins, and so does a chunk of `size` rows."""
        return [i for i in range(0, len(self), size) if i == 0 or self.group[i] != self.group[i - 1]]


def shuffled(count: int, first: int, groups: int, seed: int) -> list[int]:
    """The numbers of `groups` prompts: every one in turn, in a seeded order that is new each time around.

    Args:
        first: how many were drawn before.
    """
    positions = range(first, first + groups)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(count)
        for epoch in {position // count for position in positions}
    }
    return [int(orders[position // count][position % count]) for position in positions]


def ordered(prompts: Prompts, first: int, groups: int, seed: int) -> list[int]:
    """As `shuffled`; where lines ask for pictures of several sizes, the groups of one iteration have one size.

    A turn takes every prompt once, size by size, and the iterations of all sizes in a seeded order. The last iteration
    of a size is filled up with prompts of that size.
    """
    sizes = list(rows_by_size(prompts.metadata).values())
    if len(sizes) == 1:
        return shuffled(len(prompts), first, groups, seed)
    lengths = [-(-len(rows) // groups) for rows in sizes]
    turn, position = divmod(first // groups, sum(lengths))
    number = int(np.random.default_rng([seed, turn]).permutation(sum(lengths))[position])
    of = int(np.searchsorted(np.cumsum(lengths), number, side="right"))
    rows, part = sizes[of], number - sum(lengths[:of])
    order = np.random.default_rng([seed, turn, of]).permutation(len(rows))
    return [rows[order[i % len(rows)]] for i in range(part * groups, (part + 1) * groups)]


def draw_batch(
    prompts: Prompts,
    iteration: int,
    groups: int,
    group_size: int,
    seed: int,
    share_start_noise: bool,
    process: int = 0,
    processes: int = 1,
    picks: Sequence[int] | None = None,
) -> Batch:
    """The part of one process of an iteration's batch: `groups` prompts x `group_size` members in all.

    Which prompts and noises make up an iteration does not depend on the number of processes.

    Args:
        picks: numbers of the prompts, one a group; default `ordered`.
    """
    picks = ordered(prompts, iteration * groups, groups, seed) if picks is None else picks
    local_groups = range(process * groups // processes, (process + 1) * groups // processes)
    return draw_groups(prompts, iteration, {g: picks[g] for g in local_groups}, group_size, seed, share_start_noise)


def draw_groups(
    prompts: Prompts,
    iteration: int,
    picks: Mapping[int, int],
    group_size: int,
    seed: int,
    share_start_noise: bool,
    round: int = 0,
) -> Batch:
    """The batch of some groups of an iteration.

    Args:
        picks: number of each group's prompt.
        round: how often these groups were drawn before in this iteration.
    """

    samples = [(g, member) for g in picks for member in range(group_size)]
    again = [round] if round else []
    return Batch(
        prompts=[prompts.texts[picks[g]] for g, _ in samples],
        metadata=[prompts.metadata[picks[g]] for g, _ in samples],
        group=[g for g, _ in samples],
        seeds=[derive_seed(seed, iteration, g, 0 if share_start_noise else m, 0, *again) for g, m in samples],
        noise_seeds=[derive_seed(seed, iteration, g, m, 1, *again) for g, m in samples],
        iteration=iteration,
        picks=[picks[g] for g, _ in samples],
    )
