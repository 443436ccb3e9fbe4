"""Try flowalign with what nobody would give it, and note where it fails otherwise than by one line for people.

    python scripts/fuzz.py commands configurations --seeds 1000 3000 --seconds 3600 --corpus tests/scripts/fuzz.jsonl

A case is made from its kind and seed alone. `commands`: command lines with odd values. `configurations`: recipes with
keys changed and removed. `damages`: a run's folder with a damaged file, and a command on it. `files`: odd lists of
prompts and preferences. `rewards`: what a reward's own code may return.

A fault is a traceback, an error that flowalign calls unexpected (exit code 70), or a process that dies. Faults are
appended to the corpus, which a test replays. Each case runs in a process of its own, a fork of one that has imported
everything, offline, in a temporary folder; one that works longer than `--each` seconds is ended and counted apart.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import logging
import os
import pkgutil
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # read when the libraries below are imported
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}

import torch
import typer
import yaml

import flowalign
from flowalign.app.cli.main import UNEXPECTED, app, main
from flowalign.config import load, recipe
from flowalign.config.loader import read
from flowalign.data import Preferences, Prompts
from flowalign.errors import ConfigError
from rewards import FunctionReward, RewardError, Scores, Spec, score
from rewards.gradients import score_with_gradient

RECIPES = [
    f"tiny_sd3/{name}" for name in ("flow_grpo", "nft", "draft", "dmd2", "spo", "adjoint_matching", "dance_grpo")
]
RECIPES += ["tiny_lm/grpo", "tiny_lm/dapo", "tiny_sd3/raft", "tiny_sd3/srpo", "tiny_sd3/mix_grpo", "tiny_sd3/awm"]
# fmt: off
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**30, 0.0, 0.5, -0.5, 1e-30, 1e30, float("nan"), "", "x",
    float("inf"), [], {}, [1], ["x"], [None], [[1, 2]], {"name": "x"}, {"name": None}, {"x": 1}, "flow_grpo", "shapes",
    "ode", "a\nb", "\0", "\ud800", "é" * 300, "../..", "nowhere/at/all", "1e-3", "null", "${x}", "%s", "tiny_sd3", ":",
]
WORDS = [
    "", "x", "0", "1", "-1", "2", "8", "64", "1e999", "nan", "inf", "99999999999999999999", "½", "٣", "\udcff", "a=b",
    "=", "nowhere", "file.txt", "bytes.bin", "folder", "run", "prompts.jsonl", "config.yaml", "votes.jsonl",
    "/dev/null", "x" * 5000, "a\nb", "tiny_sd3", "tiny_lm", "tiny_clip", "tiny_sd3/flow_grpo", "tiny_lm/grpo",
    "shapes_heldout",
    "shapes", "rewards.yaml", "owner/name", "training.iterations=0", "rollout.steps=x", "seconds=1", "forwards=2",
    "rewards=[]", "a.b.c=1", "model=3", "[", "{", "seconds=nan", "picture.png", "png.png", "link", "--", "a red circle",
]
BEGUN = [
    ["sample", "tiny_sd3", "a red circle", "--output", "out", "--steps", "1"],
    ["gallery", "run", "--output", "out"], ["compare", "run", "run"], ["export", "run", "--output", "out"],
    ["plan", "tiny_sd3/flow_grpo"], ["watch", "run", "--panel", "shapes"], ["prompts", "check", "prompts.jsonl"],
    ["search", "tiny_sd3", "a red circle", "--output", "out"], ["bench", "tiny_sd3", "--suite", "shapes"],
    ["train-reward", "votes.jsonl", "--out", "out", "--model", "tiny_clip"], ["reward-check", "rewards.yaml"],
    ["eval", "run", "--prompts", "prompts.jsonl"], ["init", "tiny_sd3", "--prompts", "prompts.jsonl"],
]
"""command lines that work, to which options are added"""
# fmt: on
SKIPPED = {"demo", "reward-server", "--serve", "--help"}
"""that take minutes, or wait"""


def tree(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Every command with its parameters."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            if name not in SKIPPED:
                yield from tree(inner, (*path, name))
        return
    yield path, command.params


def make_command(rng: random.Random) -> list[str]:
    """Arguments of `flowalign`."""
    commands = dict(tree(typer.main.get_command(app)))
    begun = rng.choice(BEGUN) if rng.random() < 0.08 else None
    path = rng.choice(list(commands)) if begun is None else next(path for path in commands if path[0] == begun[0])
    words, parameters = list(begun or path), commands[path]
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            words += [] if begun else rng.choices(WORDS, k=rng.choice([0, 1, 1, 1, 1, 2]))
        elif rng.random() < 0.25 and not SKIPPED & set(parameter.opts):
            words.append(rng.choice(parameter.opts))
            if not parameter.is_flag or rng.random() < 0.05:
                words.append(rng.choice(WORDS))
    if rng.random() < 0.1:
        rng.shuffle(words)
    return words


def make_configuration(rng: random.Random) -> dict[str, Any]:
    """A recipe's name and what is changed in it: [path of keys, value, or None and "remove"]."""
    name = rng.choice(RECIPES)
    values, changes = read(recipe(name)), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        place, path = values, []
        while isinstance(place, dict) and place:
            key = rng.choice([*place, "unknown"] if rng.random() < 0.1 else list(place))
            path.append(key)
            place = place.get(key)
            if rng.random() < 0.25:
                break
        changes.append(["remove", path] if rng.random() < 0.1 else ["set", path, rng.choice(ODD)])
    return {"recipe": name, "changes": changes}


def configured(case: dict[str, Any]) -> dict[str, Any]:
    """The values of a configuration's case."""
    values: dict[str, Any] = copy.deepcopy(read(recipe(case["recipe"])))
    for action, path, *value in case["changes"]:
        place: Any = values
        for key in path[:-1]:
            place = place[key] if isinstance(place, dict) and isinstance(place.get(key), dict | list) else {}
        if isinstance(place, dict):
            place.pop(path[-1], None) if action == "remove" else place.update({path[-1]: value[0]})
    return values


def make_damage(rng: random.Random) -> dict[str, Any]:
    """A file of the run by its number, what is done to it, and a command."""
    how = rng.choice(["cut", "flip", "empty", "remove", "junk", "folder", "json", "line"])
    command = rng.choice(["gallery", "compare", "watch", "export", "eval", "gallery", "gallery", "train"])
    return {
        "file": rng.randrange(1000),
        "how": how,
        "at": rng.random(),
        "command": command,
        "value": rng.choice(ODD[:19]),
    }


def damage(path: Path, case: dict[str, Any]) -> None:
    """Do to a file what the case says."""
    data, at = bytearray(path.read_bytes()), case["at"]
    place = int(at * max(len(data) - 1, 0))
    how = case["how"]
    if how in ("remove", "folder"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        return
    if how == "flip" and data:
        data[place] ^= 1 << int(8 * at)
    changed = {"cut": data[:place], "empty": b"", "junk": random.Random(at).randbytes(200), "flip": data}.get(how)
    if changed is None:
        odd = json.dumps(case["value"]).encode()
        changed = odd if how == "json" else data[:place] + b"\n" + odd + b"\n" + data[place:]
    path.write_bytes(changed)


def make_file(rng: random.Random) -> dict[str, Any]:
    """An ending, and lines: JSON of odd records, or odd text."""
    keys = ["prompt", "chosen", "rejected", "seed", "image", "mask", "target", "rater", "medium", "text", "x"]

    def line() -> str:
        record = {
            key: rng.choice([*ODD, "a red circle", "png.png", "file.txt"])
            for key in rng.sample(keys, rng.randint(1, 5))
        }
        return rng.choice(
            [json.dumps(record), json.dumps(rng.choice(ODD)), rng.choice(WORDS), "{" * rng.randint(1, 5000)]
        )

    ending = rng.choice([".txt", ".jsonl", ".jsonl", ".jsonl", ".parquet", ".csv", ""])
    return {
        "ending": ending,
        "lines": [line() for _ in range(rng.randint(0, 4))],
        "as": rng.choice(["prompts", "preferences"]),
    }


def make_reward(rng: random.Random) -> dict[str, Any]:
    """What a function, a reward and a differentiable one return for two samples."""
    return {
        "value": rng.choice([*ODD, [0.5, 0.5], [1, 2]]),
        "parts": rng.choice([*ODD, {"a": [1.0, 2.0]}]),
        "weight": rng.choice([*ODD, [1.0, 1.0]]),
        "steps": rng.choice(ODD),
        "as": rng.choice(["function", "scores", "pixels"]),
    }


def prepare(folder: Path) -> None:
    """The files that command lines name."""
    from PIL import Image

    (folder / "file.txt").write_text("a red circle\n")
    (folder / "bytes.bin").write_bytes(random.Random(0).randbytes(300))
    (folder / "folder").mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": "a blue square"}\n')
    (folder / "votes.jsonl").write_text('{"prompt": "a", "chosen": "png.png", "rejected": "png.png"}\n')
    (folder / "rewards.yaml").write_text("rewards: [{name: shapes}]\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(read(recipe("tiny_sd3/flow_grpo"))))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    Image.new("RGB", (32, 32)).save(folder / "png.png")
    (folder / "link").symlink_to("nowhere")
    train(folder / "run")
    # once, so that no case spends its seconds on them
    for module in pkgutil.walk_packages(flowalign.__path__, "flowalign.", onerror=lambda name: None):
        with contextlib.suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def train(run: Path) -> None:
    """A run of one iteration."""
    from flowalign.training import Trainer

    own = ["training.iterations=1", "training.prompts_per_iteration=1", "training.group_size=2"]
    own += [
        "evaluation.prompts=null",
        "training.updates_per_iteration=1",
        "training.previews=0",
        f"output={run.parent}",
        f"name={run.name}",
    ]
    config = load(recipe("tiny_sd3/flow_grpo"), own)
    Trainer(config, progress=False).train()


def attempt(kind: str, case: Any) -> str | None:
    """Try a case in the current folder; the fault, None where it went as it should."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            TRIES[kind][1](case)
    except SystemExit as left:
        if left.code != UNEXPECTED and "Traceback" not in said.getvalue():
            return None
        return said.getvalue()
    except (ConfigError, RewardError, OSError) as error:
        return None if getattr(error, "errno", 0) is not None else f"no one line: {error!r}"
    except BaseException as error:
        return "".join(traceback.format_exception(error)[-6:])[-3000:]
    return None


def try_command(case: list[str]) -> None:
    main(case)


def try_configuration(case: dict[str, Any]) -> None:
    path = Path("case.yaml")
    path.write_text(yaml.safe_dump(configured(case), allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    load(path, []).check(1)


def try_damage(case: dict[str, Any]) -> None:
    shutil.rmtree("damaged", ignore_errors=True)
    shutil.copytree("run", "damaged")
    files = sorted(path for path in Path("damaged").rglob("*") if path.is_file() and "gallery" not in path.parts)
    damage(files[case["file"] % len(files)], case)
    more = {"compare": ["run"], "export": ["--output", "exported"], "gallery": ["-o", "pages"]}.get(case["command"], [])
    words = (
        ["damaged/config.yaml", "--resume", "name=damaged", "output=."] if case["command"] == "train" else ["damaged"]
    )
    main([case["command"], *words, *more])


def try_file(case: dict[str, Any]) -> None:
    path = Path(f"case{case['ending']}")
    path.write_text("\n".join(case["lines"]), encoding="utf-8", errors="surrogatepass")
    (Prompts if case["as"] == "prompts" else Preferences).read(str(path))


def try_reward(case: dict[str, Any]) -> None:
    class Own:
        name = "own"
        spec = Spec(frozenset({"image"}), differentiable=True)

        def __call__(self, *_: Any) -> Any:
            return Scores(*(case[key] for key in ("value", "parts", "steps", "weight")))

        score_pixels = __call__

    from PIL import Image

    samples, prompts, metadata = [Image.new("RGB", (8, 8))] * 2, ["a", "b"], [{}, {}]
    if case["as"] == "pixels":
        score_with_gradient(Own(), torch.rand(2, 3, 8, 8, requires_grad=True), prompts, metadata)
    else:
        reward: Any = Own() if case["as"] == "scores" else FunctionReward(lambda *_: case["value"], "own")
        score(reward, samples, prompts, metadata)


TRIES: dict[str, tuple[Any, Any]] = {
    "commands": (make_command, try_command),
    "configurations": (make_configuration, try_configuration),
    "damages": (make_damage, try_damage),
    "files": (make_file, try_file),
    "rewards": (make_reward, try_reward),
}


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A temporary folder with what cases name, and everything quiet."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            prepare(Path(name))
            yield
        finally:
            os.chdir(before)


def alone(kind: str, case: Any, each: int) -> str | None:
    """Try a case in a process of its own, within `each` seconds of work; the fault, "late", or None."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            # seconds of work, so that a busy machine ends no more cases; and of those that only wait
            resource.setrlimit(resource.RLIMIT_CPU, (each, each + 5))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(20 * each)
            said.write(attempt(kind, case) or "")
            said.flush()
            os._exit(0)
        left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # what the case started
            os.killpg(child, signal.SIGKILL)
        if left in (-signal.SIGXCPU, -signal.SIGALRM):
            return "late"
        said.seek(0)
        return f"the process ended with {left}" if left else said.read() or None


def fuzz(kinds: list[str], seeds: range, seconds: float, each: int, corpus: Path | None) -> dict[str, Counter[str]]:
    """Try all seeds of all kinds, in turns, as long as there is time; counts by kind."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    begin, known = time.monotonic(), set()
    for seed in seeds:
        for kind in kinds:
            if time.monotonic() - begin > seconds:
                return counts
            case = TRIES[kind][0](random.Random(f"{kind} {seed}"))
            fault = alone(kind, case, each)
            counts[kind][{None: "as it should", "late": "late"}.get(fault, "fault")] += 1
            if fault not in (None, "late"):
                last = fault.strip().splitlines()[-1]
                print(f"{kind} {seed}: {json.dumps(case)[:300]}\n    {last[:300]}", flush=True)
                if corpus is not None and last not in known:
                    known.add(last)
                    with open(corpus, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"kind": kind, "seed": seed, "case": case, "was": last[:200]}) + "\n")
    return counts


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=sorted(TRIES))
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 100), metavar=("FIRST", "END"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it")
    parser.add_argument("--each", type=int, default=5, help="seconds of a case's work, after which it is ended")
    parser.add_argument("--corpus", type=Path, help="JSON lines that faults are appended to")
    given = parser.parse_args()
    corpus = given.corpus and given.corpus.resolve()
    with workplace():
        logging.disable(logging.CRITICAL)
        counts = fuzz(given.kinds, range(*given.seeds), given.seconds, given.each, corpus)
    for kind, found in counts.items():
        print(f"{kind}: {sum(found.values())} tried, {dict(found)}")
    raise SystemExit(any(found["fault"] for found in counts.values()))


if __name__ == "__main__":
    run()
