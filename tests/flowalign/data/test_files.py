"""Prompts from every kind of file, and from a real data set on disk."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowalign.config import load, recipe
from flowalign.data import Preferences, PromptList, Prompts, Targets, files, prompts
from flowalign.data.prompts import OneList
from flowalign.errors import ConfigError

RECORDS: list[dict[str, Any]] = [
    {
        "prompt": "a cat\u2028at night",
        "kind": "x",
        "weight": 2.0,
        "include": [{"class": "cat", "count": 1, "color": "red"}],
    },
    {"prompt": "two dogs", "kind": "y", "include": [{"class": "dog", "count": 2}, {"class": "cat", "count": 0}]},
    {"prompt": "ein Bär", "kind": "y", "include": [], "weight": 0.5},
]


def refused(source: Path | str, **settings: Any) -> str:
    """The one line that reading is refused with."""
    with pytest.raises(ConfigError) as caught:
        Prompts.read(str(source), **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real library, with its cache in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def stored(kind: str, folder: Path) -> str:
    """The records in a file or folder of a kind."""
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    if kind == "jsonl":
        path = folder / "prompts.jsonl"
        path.write_text(lines)
        return str(path)
    import pyarrow
    import pyarrow.parquet

    path = folder / "prompts.parquet"
    if kind == "data set":
        path = folder / "named" / "test-00000-of-00001.parquet"
        path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    return str(path.parent if kind == "data set" else path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "data set"])
def test_a_record_is_the_same_whatever_it_was_stored_in(kind: str, tmp_path: Path, request: Any) -> None:
    if kind != "jsonl":
        request.getfixturevalue("datasets")
    source, split = stored(kind, tmp_path), "test" if kind == "data set" else None
    read = Prompts.read(source, split=split)
    assert [{"prompt": text, **record} for text, record in zip(read.texts, read.metadata, strict=True)] == RECORDS
    assert Prompts.read(source, {"kind": ["y"]}, split=split).texts == ["two dogs", "ein Bär"]
    other = Prompts.read(source, column="kind", split=split)
    assert other.texts == ["x", "y", "y"] and other.metadata[1]["prompt"] == "two dogs"

    overrides = [f"{key}.{name}={value}" for key in ("data", "evaluation") for name, value in (
        ("prompts", source), ("where", "{kind: [y]}"), ("limit", 1), ("split", split or "null"), ("column", "prompt")
    )]  # fmt: skip
    config = load(recipe("tiny_sd3/demo"), overrides)
    config.check(1)
    assert Prompts.of(config.data).texts == Prompts.of(config.evaluation).texts == ["two dogs"]
    assert "no prompt is left where" in refused(source, where={"kind": ["z"]}, split=split)
    named = refused(source, column="caption", split=split)
    assert "under the key 'caption'" in named and ("line 1" in named or "row 1" in named) and "kind" in named


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffa cat\r\n\r\na dog\u2028asleep\n".encode())
    read = Prompts.read(str(tmp_path / "a.txt"))
    assert read.texts == ["a cat", "a dog\u2028asleep"] and read.metadata == [{}, {}]
    (tmp_path / "a.txt").write_bytes(b"a cat\na d\xffg\n")
    assert refused(tmp_path / "a.txt") == f"{tmp_path / 'a.txt'}, line 2: not UTF-8 text"
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "a cat"}\n\n{"prompt": "a dog"\n')
    assert "b.jsonl, line 3: not a record" in refused(tmp_path / "b.jsonl")
    assert "no split or subset" in refused(tmp_path / "b.jsonl", split="test")


def test_a_long_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "prompts.txt", 0
    path.write_text("a cat\na dog\n")
    lines = files._lines

    def counted(path: Path) -> Any:
        nonlocal reads
        reads += 1
        return lines(path)

    monkeypatch.setattr(files, "_lines", counted)
    listed = PromptList(prompts=str(path), limit=1)
    assert Prompts.of(listed) is Prompts.of(listed.model_copy()) and reads == 1
    assert len(Prompts.of(PromptList(prompts=str(path)))) == 2 and reads == 2
    path.write_text("a cat\na dog\na bird\n")
    assert len(Prompts.of(PromptList(prompts=str(path)))) == 3 and reads == 3


def test_a_parquet_row_that_cannot_be_used_is_named(datasets: Any, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "p.parquet"
    for rows, hint in (
        ([{"prompt": "a"}, {"prompt": None}], "p.parquet, row 2: not a record with a text under the key 'prompt'"),
        (
            [{"prompt": "a", "made": datetime.date(2026, 1, 1)}],
            "p.parquet, row 1: the column 'made' cannot be metadata",
        ),
        ([{"prompt": "a", "image": "missing.png"}], f"p.parquet, row 1: no picture at {tmp_path / 'missing.png'}"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        assert hint in refused(path)
    path.write_bytes(b"not parquet")
    assert "not readable as parquet" in refused(path)


def test_preferences_are_read_alike(datasets: Any, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for name in ("one.png", "two.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    row = {"text": "a cat", "chosen": "two.png", "rejected": "one.png", "rater": "Ada"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, {**row, "rater": "Bob"}]), tmp_path / "p.parquet")
    read = Preferences.read(str(tmp_path / "p.parquet"), {"rater": ["Ada"]}, column="text")
    assert read.texts == ["a cat"]
    assert read.metadata[0]["chosen"] == str(tmp_path / "two.png")


def test_a_data_set_of_pictures_gives_its_captions(datasets: Any, tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "captioned" / "train"
    folder.mkdir(parents=True)
    for name in ("0.png", "1.png"):
        Image.new("RGB", (4, 4)).save(folder / name)
    lines = [{"file_name": f"{i}.png", "caption": f"caption {i}", "number": i} for i in range(2)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = Prompts.read(str(folder.parent), column="caption")
    assert read.texts == ["caption 0", "caption 1"] and read.metadata == [{"number": 0}, {"number": 1}]


def test_a_data_set_that_cannot_be_read_says_why(datasets: Any, tmp_path: Path) -> None:
    assert "the data set 'nobody/nothing' cannot be read" in refused("nobody/nothing")
    assert "Unknown split" in refused(stored("data set", tmp_path), split="validation")


def test_without_the_libraries_the_message_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "p.parquet").write_bytes(b"")
    for source in (tmp_path / "p.parquet", "owner/name"):
        assert refused(source).endswith("pip install 'flowalign[data]'")
    assert "no prompts at 'data/nowhere.txt'" in refused("data/nowhere.txt")


def test_a_folder_of_pictures_and_captions_is_data(tmp_path: Path) -> None:
    for name in ("b/1.png", "a.jpg", "c.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name == "c.mp4":
            (tmp_path / name).write_bytes(b"")
        else:
            Image.new("RGB", (8, 8)).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(f"what {name}\nshows \n")
    read = Targets.read(str(tmp_path))
    assert read.texts == ["what a.jpg shows", "what b/1.png shows", "what c.mp4 shows"]
    assert read.files == [str(tmp_path / name) for name in ("a.jpg", "b/1.png", "c.mp4")]
    (tmp_path / "a.txt").unlink()
    assert refused(tmp_path).endswith(f"a.jpg: no prompt beside it in a.txt, and no metadata.jsonl in {tmp_path}")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b/1.png", "text": "a bee", "task": "insects"}\n')
    read = Targets.read(str(tmp_path), column="text")
    assert read.texts == ["a bee"] and read.files == [str(tmp_path / "b/1.png")]
    assert read.metadata[0]["task"] == "insects"


def test_lists_follow_one_another_each_with_its_metadata(tmp_path: Path) -> None:
    for name, lines in (("one.txt", "a\nb\n"), ("two.txt", "c\nd\ne\n")):
        (tmp_path / name).write_text(lines)
    (tmp_path / "three.jsonl").write_text('{"prompt": "f", "task": "own"}\n')
    listed = PromptList(
        prompts=str(tmp_path / "one.txt"),
        metadata={"task": "x"},
        also=[
            OneList(prompts=str(tmp_path / "two.txt"), limit=2, metadata={"task": "y"}),
            OneList(prompts=str(tmp_path / "three.jsonl"), metadata={"task": "z", "k": 1}),
        ],
    )
    read = Prompts.of(listed)
    assert read.texts == ["a", "b", "c", "e", "f"]
    assert [record["task"] for record in read.metadata] == ["x", "x", "y", "y", "own"] and read.metadata[4]["k"] == 1


def test_where_takes_numbers_too(tmp_path: Path) -> None:
    file = tmp_path / "levels.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{level}", "level": level}) + "\n" for level in (1, 3, 5, "3")))
    kept = Prompts.of(PromptList.model_validate({"prompts": str(file), "where": {"level": [3, 5]}}))
    assert kept.texts == ["p3", "p5"] and [record["level"] for record in kept.metadata] == [3, 5]


@pytest.mark.parametrize(("name", "comma"), [("prompts.csv", ","), ("prompts.TSV", "\t")])
def test_tables_in_text_have_metadata_in_their_other_columns(name: str, comma: str, tmp_path: Path) -> None:
    """As a spreadsheet writes them: a byte order mark, quotes, a comma and a line's end within a cell."""
    lines = ["prompt,kind,note", '"a cat, at night",x,"one\r\ntwo"', "ein Bär,,"]
    rows = [
        line.replace(",", comma) if '"' not in line else line.replace('",', f'"{comma}').replace("x,", f"x{comma}")
        for line in lines
    ]
    (tmp_path / name).write_bytes(("\ufeff" + "\r\n".join(rows) + "\r\n").encode())
    read = Prompts.read(str(tmp_path / name))
    assert read.texts == ["a cat, at night", "ein Bär"]
    assert read.metadata == [{"kind": "x", "note": "one\r\ntwo"}, {}]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prompt,kind\na cat,x,y\n", "line 2: not as many cells as the first line has names (2)"),
        ("prompt,kind\na cat\n", "line 2: not as many cells as the first line has names (2)"),
        ('prompt\n"a cat\n', "not readable as a table: unexpected end of data"),
        ("prompt\n", "no prompt is left"),
        ("", "no prompt is left"),
        ("caption\na cat\n", "its keys are caption"),
    ],
)
def test_broken_tables_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text(text)
    assert complaint in refused(tmp_path / "prompts.csv")


def test_a_further_list_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.also\[0\].prompts: null names no prompts"):
        Prompts.of(PromptList(prompts="shapes_train", also=[OneList(prompts=None)]))


def test_pictures_of_a_long_list_are_read_by_their_headers_and_the_first_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) - 40])
    (tmp_path / "none.webp").write_bytes(b"no picture")

    def read(*names: str) -> Prompts:
        lines = [json.dumps({"prompt": "x", "image": name, "category": name}) for name in names]
        (tmp_path / "list.jsonl").write_text("\n".join(lines))
        return Prompts.read(str(tmp_path / "list.jsonl"), where={"category": [names[0], "cut.png"]})

    for names in (("good.png", "cut.png"), ("none.webp",)):
        with pytest.raises(ConfigError, match=rf"list.jsonl.*{len(names)}: .*{names[-1]} cannot be read as a picture"):
            read(*names)
    # what `where` leaves out is not looked at
    assert len(read("good.png", "none.webp")) == 1
    monkeypatch.setattr(prompts, "DECODED", 1)
    assert len(read("good.png", "cut.png")) == 2
