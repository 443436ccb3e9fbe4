import json

import numpy as np
from PIL import Image

from flowalign.app.gallery import Film, Group, Limits, save_previews
from flowalign.app.gallery.runs import read_run


def noise(side: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def film(states: int, side: int = 32) -> Film:
    rewards = np.linspace(0, 1, states)
    return Film(
        prompt="p",
        seed=1,
        pictures=[noise(side, i) for i in range(states)],
        rewards=rewards,
        stochastic=np.arange(states - 1) % 2 == 0,
    )


def test_what_is_saved_is_read_back(tmp_path):
    group = Group(
        prompt="g",
        seeds=[3, 4],
        samples=[noise(32, 0), noise(32, 1)],
        rewards=np.float32([0.25, 0.75]),
        advantages=[-1, 1],
        parts={"soft": [0.5, 1]},
        wins=np.eye(2),
    )
    save_previews(tmp_path, 7, [film(5)], [group])
    (moment,) = read_run(tmp_path, "run").previews
    assert moment.iteration == 7
    assert moment.films[0]["rewards"] == [0, 0.25, 0.5, 0.75, 1] and moment.films[0]["dense"] == [0.25] * 4
    assert moment.films[0]["stochastic"] == [1, 0, 1, 0] and moment.films[0]["turning"] is None
    assert moment.groups[0]["wins"] == [[1, 0], [0, 1]]
    assert [m["parts"] for m in moment.groups[0]["members"]] == [{"soft": 0.5}, {"soft": 1.0}]
    # small pictures are kept without loss
    assert np.array_equal(Image.open(moment.films[0]["pictures"][2]).convert("RGB"), noise(32, 2))


def test_size_is_bounded(tmp_path):
    limits = Limits(films=2, groups=1, frames=5, members=3, side=64, moments=3)
    groups = [
        Group(
            prompt="g",
            seeds=range(8),
            samples=[noise(128, i) for i in range(8)],
            rewards=range(8),
            wins=np.ones((8, 8)),
        )
    ] * 2
    for iteration in range(0, 80, 10):
        save_previews(tmp_path, iteration, [film(12, 128)] * 3, groups, limits)
    kept = sorted(path.name for path in (tmp_path / "previews").iterdir())
    assert len(kept) == 3 and kept[0] == "iteration-000000" and kept[-1] == "iteration-000070"
    folder = tmp_path / "previews" / kept[-1]
    films = [json.loads(line) for line in (folder / "films.jsonl").read_text().splitlines()]
    assert len(films) == 2 and len(films[0]["rewards"]) == 12
    shown = [i for i, name in enumerate(films[0]["pictures"]) if name]
    assert len(shown) == 5 and shown[0] == 0 and shown[-1] == 11
    pictures = list(folder.glob("*.webp"))
    assert len(pictures) == 2 * 5 + 3 and all(max(Image.open(p).size) == 64 for p in pictures)
    (group,) = read_run(tmp_path, "run").previews[-1].groups
    assert len(group["members"]) == 3 and len(group["wins"]) == 3


def test_saving_again_replaces_and_leaves_no_partial(tmp_path):
    save_previews(tmp_path, 1, [film(3), film(3)])
    (tmp_path / "previews" / ".partial-iteration-000001").mkdir()
    save_previews(tmp_path, 1, [film(3)])
    assert [path.name for path in (tmp_path / "previews").iterdir()] == ["iteration-000001"]
    assert len(read_run(tmp_path, "run").previews[0].films) == 1
