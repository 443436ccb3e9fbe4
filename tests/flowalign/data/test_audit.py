"""An audit of prompts against lists whose faults are known."""

import json
import random
from pathlib import Path

import pytest

from flowalign.app.cli.main import main
from flowalign.data import Prompts
from flowalign.data.audit import SimilarPair, audit, contaminated, similar, token_counters, unsafe_in

TEXTS = ["A red circle.", "a  red circle", "a blue square", "a blue square and a nude", "a long, long road"]


def listed(*texts, **metadata):
    return Prompts(list(texts), [dict(metadata) for _ in texts])


def test_every_fault_is_found_and_nothing_else():
    prompts = Prompts(TEXTS, [{"category": "one"}, {"category": "one"}, {"category": "two"}, {}, {}])
    other = listed("square blue a", "a green circle", category="three")
    found = audit(prompts, other, ["nude", "RED circle", "oad"], 0.7, encoders={"words": (lambda t: len(t.split()), 4)})
    assert found.prompts == 5 and found.duplicates == [("A red circle.", 2)]
    # 3 of 5 words of 'a blue square and nude' are too few
    assert found.near == [] and found.leaked == [SimilarPair("a blue square", "square blue a", 1.0)]
    assert audit(prompts, near=0.6).near == [SimilarPair("a blue square", "a blue square and a nude", 0.6)]
    assert [word for _, word in found.unsafe] == ["RED circle", "RED circle", "nude"]
    assert found.categories == {"one": 2, "two": 1} and found.missing == ["three"]
    (length,) = found.lengths
    assert (length.longest, length.over) == (6, ["a blue square and a nude"])


def test_a_leak_in_the_same_order_is_named_before_one_in_another():
    found = audit(listed("a cat left of a dog"), listed("a dog left of a cat", "A cat, left of a dog"))
    assert found.leaked == [SimilarPair("a cat left of a dog", "A cat, left of a dog", 1.0)]


def test_similarity_is_jaccards_index(monkeypatch):
    monkeypatch.setattr("flowalign.data.audit.CHUNK", 2)
    texts = ["a b c", "b c d", "x", "a b c d", ""]
    sets = [set(text.split()) for text in texts]
    expected = {
        (i, j): len(one & two) / len(one | two) for i, one in enumerate(sets) for j, two in enumerate(sets) if one & two
    }
    found = {(i, j): value for i, j, value in similar(texts, texts, 0.01)}
    assert found == pytest.approx(expected)


def test_unsafe_words_are_whole_words():
    assert unsafe_in("a bloody-minded man", ["bloody", "minded man", "man bloody", "blood"]) == ["bloody", "minded man"]


def test_the_command_counts_tokens_as_the_models_tokenizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "prompts.txt"
    file.write_text("a red circle\n" + "a red circle and " * 8 + "a blue square\n")
    with pytest.raises(SystemExit) as left:
        main(
            [
                "prompts",
                "audit",
                str(file),
                "--against",
                "shapes",
                "--model",
                "tiny_sd3",
                "--json",
                f"{tmp_path}/a.json",
            ]
        )
    assert not left.value.code
    printed, record = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert "2 prompts" in printed and "in shapes too, or nearly: 1" in printed
    assert [length["encoder"] for length in record["lengths"]] == ["tokenizer", "tokenizer_2"]
    assert all(len(length["over"]) == 1 for length in record["lengths"])
    count, limit = token_counters("tiny_sd3")["tokenizer"]
    # the beginning and the end are tokens too
    assert (count("a red circle"), limit) == (5, 16)


def literally(train: str, test: str, size: int) -> float:
    """Tulu 3's sec. 3.2, word by word: a word matches where both have a run of words with it."""
    one, other = train.split(), test.split()
    matched = 0
    for place in range(len(other)):
        runs = [other[i : i + size] for i in range(max(0, place - size + 1), place + 1)]
        matched += any(len(run) == size and any(one[j : j + size] == run for j in range(len(one))) for run in runs)
    return matched / len(other)


def test_contamination_is_the_share_of_words_in_common_runs():
    draw = random.Random(0)
    benchmark = [" ".join(draw.choices("abc", k=draw.randint(2, 14))) for _ in range(8)]
    train = [" ".join(draw.choices("abc", k=draw.randint(2, 30))) for _ in range(60)]
    found = {one.row: one for one in contaminated(train, benchmark, size=4)}
    shares = [[literally(text, other, 4) for other in benchmark] for text in train]
    assert set(found) == {row for row, values in enumerate(shares) if max(values) > 0.5} and 5 < len(found) < 55
    for row, one in found.items():
        assert one.share == pytest.approx(max(shares[row])) == pytest.approx(shares[row][one.benchmark])
    # eight words of sixteen are half, and no more than half
    question = " ".join(f"w{i}" for i in range(16))
    begun, longer = (" ".join(question.split()[:count]) for count in (8, 9))
    assert [one.row for one in contaminated([begun, longer, question.upper() + "?"], [question])] == [1, 2]


def test_the_command_leaves_the_other_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    question = "how many apples does Tom have if he eats two of his five apples"
    train, test, out = (tmp_path / name for name in ("train.jsonl", "test.txt", "left.jsonl"))
    rows = [{"prompt": f"Say: {question}!", "answer": "3"}, {"prompt": "What is a plum?", "answer": "fruit"}]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test.write_text(f"{question}\nWhat is a plum?\n")
    with pytest.raises(SystemExit) as left:
        main(["prompts", "decontaminate", str(train), "--against", str(test), "--output", str(out)])
    assert not left.value.code
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows[1:]
    assert "1 of 2 prompts, with 50.0% of the benchmark" in capsys.readouterr().out
