"""Pictures and videos to learn from: one for each prompt, or with a label that says whether it is good."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flowalign.data.prompts import Prompts
from flowalign.errors import ConfigError

LABELS: Mapping[Any, bool] = {True: True, False: False, "good": True, "bad": False}
"""Labels by their words in a file; 1 and 0 are true and false."""


@dataclass
class Targets(Prompts):
    """Prompts with a picture or a video each, whose file the metadata name under 'target'.

    Of a line with the keys 'chosen' and 'rejected', a preference, it is the chosen one.
    """

    noun = "target"
    samples: ClassVar[tuple[str, ...]] = ("target",)

    @classmethod
    def parts(cls, record: dict[str, Any]) -> list[dict[str, Any]]:
        if "target" in record or not {"chosen", "rejected"} <= record.keys():
            return [record]
        return [{"target" if key == "chosen" else key: value for key, value in record.items() if key != "rejected"}]

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        """Make the files that the metadata name paths of files that are there."""
        super().check(record, folder, place)
        if record.get("reference") in (None, record.get("image")):
            # what rewards that compare with a picture compare with
            record["reference"] = record["target"]


@dataclass
class Labels(Targets):
    """Targets that are good or bad: true or false under 'label'.

    A line with the keys 'chosen' and 'rejected', a preference, is a good and a bad one.
    """

    noun = "labelled target"

    @classmethod
    def parts(cls, record: dict[str, Any]) -> list[dict[str, Any]]:
        if not {"chosen", "rejected"} <= record.keys():
            return [record]
        rest = {key: value for key, value in record.items() if key not in ("chosen", "rejected")}
        return [rest | {"target": record[key], "label": key == "chosen"} for key in ("chosen", "rejected")]

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        """Make files paths, and the label true or false."""
        super().check(record, folder, place)
        label = record.get("label")
        if not isinstance(label, bool | int | str) or label not in LABELS:
            raise ConfigError(f"{place}: 'label' is not true (good) or false (bad)")
        record["label"] = LABELS[label]

    def of_both_kinds(self) -> "Labels":
        """Itself, where some are good and some bad.

        Raises:
            ConfigError: all are alike.
        """
        good = sum(record["label"] for record in self.metadata)
        if good in (0, len(self)):
            have, lack = ("good", "bad") if good else ("bad", "good")
            raise ConfigError(
                f"all {len(self)} labelled targets are {have}; it takes {lack} ones too, and sft learns from good "
                "ones alone"
            )
        return self

    def with_share(self, good: float) -> "Labels":
        """Lines such that this share of them is good, to a line: all of both kinds, one kind repeated in turn."""
        rows: dict[bool, list[int]] = {True: [], False: []}
        for row, record in enumerate(self.metadata):
            rows[record["label"]].append(row)
        # as many of either kind for each of the other
        for kind, each in ((True, good / (1 - good)), (False, (1 - good) / good)):
            wanted = round(each * len(rows[not kind]))
            rows[kind] = [rows[kind][i % len(rows[kind])] for i in range(max(wanted, len(rows[kind])))]
        chosen = rows[True] + rows[False]
        return replace(self, texts=[self.texts[row] for row in chosen], metadata=[self.metadata[row] for row in chosen])


@dataclass
class Judged(Targets):
    """Targets with a reward for every region.

    'regions' are records with a 'box' (left, top, right and bottom in shares of the picture's sides) and a 'reward' in
    [-1, 1]; 'background' is the reward of the rest, default 0. 'anchor' is another picture to hold on to, default the
    target.
    """

    noun = "judged target"
    samples = ("target", "anchor")

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        """Make files paths, and refuse what is no region."""
        record.setdefault("anchor", record.get("target"))
        super().check(record, folder, place)
        regions, background = record.get("regions"), record.setdefault("background", 0.0)
        if not isinstance(regions, list) or not all(_is_region(region) for region in regions):
            raise ConfigError(
                f"{place}: 'regions' is no list of records like "
                '{"box": [0.1, 0.2, 0.5, 0.6], "reward": 0.8}, a box in shares of the sides and a reward in [-1, 1]'
            )
        if not _within(background, -1):
            raise ConfigError(f"{place}: 'background' is no reward in [-1, 1]")


def _is_region(region: object) -> bool:
    if not isinstance(region, dict) or not isinstance(region.get("box"), list) or len(region["box"]) != 4:
        return False
    return all(_within(side, 0) for side in region["box"]) and _within(region.get("reward"), -1)


def _within(value: object, lowest: float) -> bool:
    """Whether it is a number from there to 1."""
    return isinstance(value, int | float) and lowest <= value <= 1
