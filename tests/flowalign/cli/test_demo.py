"""What `flowalign demo` leaves behind; how good it is takes minutes and is in docs/demo.md."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from flowalign.cli import demo


def test_it_ends_on_a_gallery_of_the_pictures_that_were_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "PICTURES", 1)
    console = Console(record=True, width=200)
    demo.run_demo(1, tmp_path / "demo.json", tmp_path / "runs", 1, console)
    (run,) = json.loads((tmp_path / "demo.json").read_text())["runs"]
    page = tmp_path / "runs" / "gallery" / "index.html"
    assert str(page) in console.export_text().splitlines()[-1]
    data = json.loads(re.search(r'id="data">(.*?)</script', page.read_text(), re.S)[1])
    assert data["columns"] == [[0, 0], [0, 1]] and not data["runs"][0]["notes"]
    assert len(data["rows"]) == run["pictures"] + run["others_pictures"]
    strict = data["scores"].index("strict")
    for column, when in ((0, "before"), (1, "after")):
        counting = [
            values[strict]
            for row, c, *_, values in data["pictures"]
            if c == column and data["rows"][row][2]["category"] == "counting"
        ]
        assert sum(counting) / len(counting) == pytest.approx(run[f"strict_{when}"])
