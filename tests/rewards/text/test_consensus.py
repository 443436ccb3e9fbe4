"""Agreement across wordings of a question, against what its authors' reward manager does with two lists."""

from collections import Counter

from rewards import score
from rewards.text.consensus import CoMajority


def test_each_wording_is_labelled_by_the_other() -> None:
    """Co-Reward's co_reward.py, on lists: majority_vote of one side's answers is the label of the other's."""
    first, second = ["=3", "=3", "=4", "none"], ["=4", "=4", "=3", "=4"]
    third = ["=1", "=2"]
    reward = CoMajority(r"=(\d)")
    prompts = ["2+1"] * 4 + ["1+2"] * 4 + ["alone"] * 2
    records = [{"pair": 0}] * 8 + [{"pair": 1}] * 2
    made = score(reward, [*first, *second, *third], prompts, records)

    def label(texts: list[str]) -> str:
        return Counter(text for text in texts if text != "none").most_common(1)[0][0]

    expected = [float(text == label(second)) for text in first] + [float(text == label(first)) for text in second]
    assert made.value.tolist() == [*expected, 0.0, 0.0] == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert made.parts["unlabelled"].tolist() == [0.0] * 8 + [1.0] * 2
