"""The folder that keeps what searches found, so that one that was interrupted goes on after the last it finished.

search.json       what was asked for
tried.jsonl       a line for each prompt and method: all that was tried
pictures/         the first, the best and the worst sample of each, and a sheet of small pictures of all that was tried
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from flowalign.errors import ConfigError, FlowalignError
from flowalign.runs.files import write_atomically
from flowalign.runs.foreign import inside
from flowalign.runs.samples import Picture, save_picture
from flowalign.search.found import SearchResult
from rewards.pictures import read_frames

ENDS = ("first", "best", "worst")


class SearchStore:
    """The searches in a folder.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, folder / "tried.jsonl"

    def open(self, settings: dict[str, Any]) -> dict[tuple[int, str], SearchResult]:
        """Finished results, by number of the prompt and method.

        Args:
            settings: settings that tell these searches from others.

        Raises:
            ConfigError: the folder has searches that asked for something else.
        """
        known = self.folder / "search.json"
        if known.is_file():
            before = json.loads(known.read_text(encoding="utf-8"))
            if differs := [key for key in settings if before.get(key) != json.loads(json.dumps(settings[key]))]:
                raise ConfigError(
                    f"{self.folder} holds a search with another {', '.join(differs)}; another output folder works"
                )
        (self.folder / "pictures").mkdir(parents=True, exist_ok=True)
        write_atomically(known, json.dumps(settings, indent=1))
        done = {}
        text = self.lines.read_text(encoding="utf-8") if self.lines.is_file() else ""
        # what follows the last line's end is of a search that was interrupted while it was written
        whole, _, rest = text.rpartition("\n")
        if rest:
            write_atomically(self.lines, f"{whole}\n" if whole else "")
        for place, line in enumerate(whole.splitlines(), 1):
            with self._reading(place):
                record = json.loads(line)
                number, files, _ = record.pop("number"), record.pop("pictures"), record.pop("tried", None)
                samples = {name: _opened(inside(self.folder, file)) for name, file in files.items()}
                done[number, record["method"]] = SearchResult.of(record, samples)
        return done

    @contextmanager
    def _reading(self, place: int) -> Iterator[None]:
        """Refuse a line that `add` did not write, by its number in the file; its pictures are in the folder."""
        try:
            yield
        except FlowalignError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.lines}, line {place}: no search as flowalign keeps it ({type(error).__name__}); "
                "another output folder works"
            ) from error

    def add(self, number: int, found: SearchResult) -> None:
        """Keep what was found for a prompt."""
        files = {}
        for name in ENDS:
            path = self.folder / "pictures" / f"{number:05d}-{found.method}-{name}"
            files[name] = save_picture(getattr(found, name).sample, path, "png").relative_to(self.folder).as_posix()
        record = {"number": number, "pictures": files} | found.record()
        if found.small:
            path = self.folder / "pictures" / f"{number:05d}-{found.method}-tried.webp"
            record["tried"] = _save_sheet(found.small, path) | {"picture": path.relative_to(self.folder).as_posix()}
        with self.lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")

    def write_pairs(self, path: Path, rater: str) -> int:
        """Write preferences as `dpo` and `train-reward` read them: of each search the best sample over the worst.

        Args:
            rater: whose preferences they are.

        Returns:
            how many; searches whose samples all scored the same have none.
        """
        lines = []
        for place, line in enumerate(self.lines.read_text(encoding="utf-8").splitlines(), 1):
            with self._reading(place):
                record = json.loads(line)
                best, worst = record["best"]["score"], record["worst"]["score"]
                files = {"chosen": record["pictures"]["best"], "rejected": record["pictures"]["worst"]}
                paths = {side: inside(self.folder, file) for side, file in files.items()}
            if best > worst:
                sides = {side: os.path.relpath(file, path.parent) for side, file in paths.items()}
                scores = {"chosen_score": best, "rejected_score": worst}
                lines.append({"prompt": record["prompt"], **sides, "rater": rater, "method": record["method"]} | scores)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
        return len(lines)


def _opened(path: Path) -> Picture:
    """A picture, or a video as its frames."""
    frames = read_frames(path)
    return frames if len(frames) > 1 else frames[0]


def _save_sheet(pictures: dict[int, Image.Image], path: Path) -> dict[str, Any]:
    """Pictures of one size side by side in rows.

    Returns:
        their 'width' and 'height', and their numbers, 'nodes', in order; a row has as many as the root of all, rounded
        up.
    """
    shown = list(pictures.values())
    width, height = shown[0].size
    columns = math.ceil(math.sqrt(len(shown)))
    sheet = Image.new("RGB", (columns * width, -(-len(shown) // columns) * height))
    for slot, picture in enumerate(shown):
        sheet.paste(picture, (slot % columns * width, slot // columns * height))
    sheet.save(path, quality=85)
    return {"width": width, "height": height, "nodes": list(pictures)}
