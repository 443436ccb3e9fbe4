"""Verifiers: right, wrong, empty and slow answers."""

from pathlib import Path

import pytest

from rewards import RewardError, score
from rewards.text.verifiers import ExactMatch, Maths, MultipleChoice
from tests.rewards.text import odd_answers


def values(reward, texts, right):  # type: ignore[no-untyped-def]
    scores = score(reward, texts, ["?"] * len(texts), [{"answer": answer} for answer in right])
    return scores.value.tolist()


def pairs(rows: list[tuple[str, str, bool]]) -> set[tuple[str, str]]:
    return {(right, text) for right, text, _ in rows}


def mistaken(reward: Maths | MultipleChoice, rows: list[tuple[str, str, bool]]) -> set[tuple[str, str]]:
    right, texts, verdicts = zip(*rows, strict=True)
    given = values(reward, texts, right)
    return {row[:2] for row, value, verdict in zip(rows, given, verdicts, strict=True) if bool(value) != verdict}


def test_exact_match_of_the_whole_text_or_of_a_pattern() -> None:
    texts = ["42", " 42\n", "42.", "", "the answer is 42"]
    assert values(ExactMatch(), texts, ["42"] * 5) == [1, 1, 0, 0, 0]
    boxed = ExactMatch(pattern=r"<answer>(.*?)</answer>")
    texts = ["<answer> 42 </answer>", "<answer>41</answer>, no: <answer>42</answer>", "42", "<answer></answer>"]
    assert values(boxed, texts, ["42"] * 4) == [1, 1, 0, 0]
    # an empty answer is wrong even where the right one is empty
    assert values(ExactMatch(), [""], [""]) == [0]


def test_a_prompt_without_an_answer_says_so() -> None:
    with pytest.raises(RewardError, match="the prompt '1\\+1=' has no 'answer'"):
        score(ExactMatch(), ["2"], ["1+1="], [{}])


def test_the_right_answer_is_found_within_a_solution(maths: Maths) -> None:
    solutions = ["48 / 2 = <<48/2=24>>24 clips.\n#### 1,072", "none: #### 5\n#### -3"]
    reward = ExactMatch(pattern=r"#### (-?[\d.,]+)", answer_pattern=r"#### (\S+)")
    assert values(reward, ["#### 1,072", "so 5"], solutions) == [1, 0]
    loose = Maths(timeout=60, workers=1, answer_pattern=r"#### (\S+)")
    loose._checkers = maths._checkers  # its process is running
    assert values(loose, ["it is 1072", "#### -3"], solutions) == [1, 1]
    with pytest.raises(RewardError, match="answer_pattern finds nothing under 'answer' of the prompt '\\?'"):
        values(reward, ["72"], ["72"])


def test_pictures_and_texts_are_not_mixed_up() -> None:
    from PIL.Image import new

    from rewards.shapes.reward import ShapesReward

    with pytest.raises(RewardError, match="scores texts, but got a picture"):
        score(ExactMatch(), [new("RGB", (8, 8))], ["?"], [{"answer": "2"}])
    with pytest.raises(RewardError, match="scores pictures, but got a text"):
        score(ShapesReward(), ["a red circle"], ["a red circle"], [{}])


def test_multiple_choice_decides_as_a_reader_would() -> None:
    texts = ["A, C, or rather E", "B, wait: E", "no letter of theirs"]
    assert values(MultipleChoice(options="ABCDE"), texts, ["E"] * 3) == [1, 1, 0]
    assert mistaken(MultipleChoice(), odd_answers.CHOICES) == odd_answers.KNOWN & pairs(odd_answers.CHOICES)


@pytest.fixture(scope="module")
def maths() -> Maths:
    """With one process, which loads its libraries once."""
    return Maths(timeout=60, workers=1)


def test_maths_knows_equal_expressions(maths: Maths) -> None:
    texts = ["$\\frac{1}{2}$", "so it is 0.5", "\\boxed{\\frac{2}{4}}", "0.51", "", "nonsense ((", "$x^2+2x+1$"]
    right = ["1/2"] * 6 + ["$(x+1)^2$"]
    assert values(maths, texts, right) == [1, 1, 1, 0, 0, 0, 1]


def test_maths_judges_odd_answers_as_a_reader_would(maths: Maths) -> None:
    assert mistaken(maths, odd_answers.MATHS) == odd_answers.KNOWN & pairs(odd_answers.MATHS)


def test_what_a_model_writes_runs_nothing_and_ends(maths: Maths, tmp_path: Path) -> None:
    touch = f"__import__('pathlib').Path('{tmp_path / 'here'}').touch()"
    hostile = [
        touch,
        f"\\boxed{{{touch}}}",
        "\\boxed{" * 3000,
        f"\\boxed{{{'9' * 5000}.5}}",
        f"0.\\overline{{{'3' * 5000}}}",
    ]
    assert values(maths, hostile, ["2"] * len(hostile)) == [0] * len(hostile)
    assert not list(tmp_path.iterdir())
    maths.timeout = 0.5
    scores = score(maths, ["\\boxed{9^{9^{9^9}}}"], ["?"], [{"answer": "2"}])
    maths.timeout = 60
    assert scores.value.tolist() == [0] and scores.parts["maths_timeout"].tolist() == [1]


def test_the_right_answer_of_maths_is_read_whole(maths: Maths) -> None:
    """As verl does; a raw one is read up to its first number, or not at all."""
    cases = [
        (r"2\sqrt{3}", r"\boxed{2}", 0),
        (r"2\sqrt{3}", r"\boxed{2\sqrt{3}}", 1),
        ("(1,2)", r"so \boxed{(1, 2)}", 1),
        ("(1,2)", r"so \boxed{2}", 0),
        ("x^2+2x+1", r"$(x+1)^2$", 1),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
        (r"\text{Evelyn}", r"\boxed{\text{Simon}}", 0),
        (r"$\frac{1}{2}$", "0.5", 1),
        (r"\boxed{5}", "it is 5", 1),
    ]
    right, texts, expected = zip(*cases, strict=True)
    assert values(maths, texts, right) == list(expected)


def test_a_right_answer_that_is_no_mathematics_is_reported_and_not_scored(
    maths: Maths, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = [{"answer": "}{"}, {"answer": "4"}]
    scores = score(maths, ["4", "4"], ["?", "2+2"], metadata)
    assert scores.value.tolist() == [0, 1] and scores.parts["maths_unreadable"].tolist() == [1, 0]
    assert scores.weight is not None and scores.weight.tolist() == [0, 1]
    assert "the right answer '}{' of the prompt '?'" in caplog.text


def test_a_slow_check_counts_as_wrong_and_the_next_one_works(maths: Maths) -> None:
    assert values(maths, ["2"], ["2"]) == [1]
    # nobody is that quick, with a sum that long
    maths.timeout = 0.0
    scores = score(maths, [f"${'+'.join(['2'] * 500)}$"], ["?"], [{"answer": "1000"}])
    assert scores.value.tolist() == [0] and scores.parts["maths_timeout"].tolist() == [1]
    maths.timeout = 60
    assert values(maths, ["$2+2$"], ["4"]) == [1]


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.text.verifiers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="flowalign\\[maths\\]"):
        Maths()
