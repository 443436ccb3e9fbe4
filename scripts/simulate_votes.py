"""Two simulated raters vote on a run's newest samples: Ada by the saved reward, with errors, Bob without a look.

    python scripts/simulate_votes.py runs/one [--votes 60] [--errs 0.1]

The votes go to runs/one/gallery, where `flowalign gallery runs/one --serve` shows them. It needs two samples a prompt.
"""

import argparse
from pathlib import Path

import numpy as np

from flowalign.app.gallery.build import lay_out
from flowalign.app.gallery.polls import Polls
from flowalign.data.votes import plain_of

RATERS = ("Ada", "Bob")
"""Ada looks, Bob does not."""


def choice(polls: Polls, moment: int, ballot: dict[str, object], rng: np.random.Generator, errs: float) -> str:
    """The side whose sample scores higher, with errors; of a broken and a whole sample the whole one."""
    sides = ("left", "right")
    key = str(ballot["pair"])
    shown = [polls.picture(moment, moment, key, s, Path(ballot[s]["picture"]).stem) for s in sides]  # type: ignore[index]
    if any(isinstance(picture, bytes) for picture in shown):
        return sides[isinstance(shown[0], bytes)]
    scores = {one.picture: one.sample.scores["reward"] for one in polls.contest(moment, moment)[plain_of(key)]}
    better = int(scores[shown[1]] > scores[shown[0]])  # type: ignore[index]
    if scores[shown[0]] == scores[shown[1]]:  # type: ignore[index]
        return "tie"
    return sides[better ^ int(rng.random() < errs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--votes", type=int, default=60, help="of each rater")
    parser.add_argument("--errs", type=float, default=0.1, help="share of Ada's choices that are wrong")
    given = parser.parse_args()
    folder = given.run / "gallery"
    polls, rng = Polls(lay_out([given.run], folder), folder), np.random.default_rng(0)
    moment = len(polls.gallery.columns) - 1
    for _ in range(given.votes):
        for rater in RATERS:
            ballot = polls.next(rater, moment, moment)
            if ballot["pair"] is None:
                continue
            blind = ("left", "right")[rng.integers(2)]
            verdict = choice(polls, moment, ballot, rng, given.errs) if rater == "Ada" else blind
            polls.vote(rater, moment, moment, ballot["pair"], verdict)
    table = polls.results(moment, moment)
    for row in table["raters"]:
        again, caught = (
            f"{row[name]['rate']:.0%} ({row[name]['low']:.0%} to {row[name]['high']:.0%}) of {row[name]['pairs']}"
            if row[name]["pairs"]
            else "none yet"
            for name in ("again", "caught")
        )
        choices = row["wins"] + row["losses"]
        print(f"{row['rater']}: {choices} choices; same again {again}; right where one is broken {caught}")
    for row in table["between"]:
        print(f"both judged {row['pairs']} pairs")
        if row["kappa"] is not None:
            print(f"Cohen's kappa {row['kappa']:.2f} ({row['low']:.2f} to {row['high']:.2f})")
    for reward in table["rewards"]:
        print(f"agrees with {reward['name']}: {reward['rate']:.0%} ({reward['low']:.0%} to {reward['high']:.0%})")
    print(*table["failing"], table["enough"], sep="\n")


if __name__ == "__main__":
    main()
