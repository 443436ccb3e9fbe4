"""Labels of a taxonomy, level by level, against precision and recall counted one by one."""

import pytest

from rewards import score
from rewards.text.labels import Taxonomy

RIGHT = ["anatomy/hand", "scene/shadow"]
TEXTS = {
    "A hand is wrong.\n- anatomy/hand\n- scene/shadow": RIGHT,
    "anatomy/face": ["anatomy/face"],
    "object/missing\nscene/Shadow": ["object/missing", "scene/shadow"],
    "Nothing is wrong.": [],
}


def test_each_level_is_scored_as_sets_of_paths() -> None:
    made = score(Taxonomy([1.0, 3.0]), list(TEXTS), ["?"] * 4, [{"labels": RIGHT}] * 4)
    for level in (1, 2):
        right, expected = {"/".join(label.split("/")[:level]) for label in RIGHT}, []
        for labels in TEXTS.values():
            found = {"/".join(label.split("/")[:level]) for label in labels}
            hits = sum(label in right for label in found)
            precision, recall = hits / max(1, len(found)), hits / len(right)
            expected.append(2 * precision * recall / (precision + recall) if hits else 0.0)
        assert made.parts[f"level_{level}"].tolist() == pytest.approx(expected)
    assert made.value.tolist() == pytest.approx([1.0, (2 / 3) / 4, 0.5, 0.0])
    assert score(Taxonomy(), ["Nothing is wrong."], ["?"], [{"labels": []}]).value.tolist() == [1.0]
