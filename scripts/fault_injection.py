"""Damage what flowalign reads, and count how it takes it: python scripts/fault_injection.py checkpoints

    checkpoints      the newest of a small run's two, in nine ways a file; then the run is to go on
    configurations   the shipped recipes with random changes; they are read and checked, and no model loads
    kills            a small run, killed and asked to leave at random moments until it is done, against one in peace
    prompts          files of prompts that are broken in every way thought of

Outcomes: 'fine', 'refused' in one line, 'passed over' for the checkpoint before, and what must not be: 'WRONG' weights,
'TRACEBACK', 'HANGS' (over a minute). Leaves with 1 where one of these came up, and lists them.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.errors import FlowalignError
from flowalign.runs.checkpoint import Checkpoints
from flowalign.training import Trainer
from rewards import RewardError

SECONDS = 60
"""after which something hangs"""


class Hangs(BaseException):
    """Nothing catches it."""


def outcome(work: Callable[[], str]) -> str:
    """What `work` says, or how it ends."""

    def stop(*_: object) -> None:
        raise Hangs

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return work()
    except (FlowalignError, RewardError) as error:
        return "refused" if "\n" not in str(error) else f"TRACEBACK: several lines: {error!r}"
    except Hangs:
        return "HANGS"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"TRACEBACK: {type(error).__name__}: {str(error)[:100]} ({where.filename}:{where.lineno})"
    finally:
        signal.alarm(0)


# Checkpoints


def damages(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to damage a file, by name."""
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) * 3 // 4] ^= 1

    def folder() -> None:
        path.unlink()
        path.mkdir()

    def other_values() -> None:
        if path.suffix == ".json":
            values = json.loads(whole)
            values["iteration"] = 1
            path.write_text(json.dumps(values))
        else:
            save_file({name: value[:1].clone() for name, value in load_file(path).items() if value.dim()}, path)

    def not_finite() -> None:
        if path.suffix == ".json":
            path.write_text(whole.decode().replace("1", "NaN", 1))
        else:
            tensors = load_file(path)
            floats = {n: torch.full_like(v, float("nan")) if v.is_floating_point() else v for n, v in tensors.items()}
            save_file(floats, path)

    yield "missing", path.unlink
    yield "empty", lambda: path.write_bytes(b"")
    yield "cut in half", lambda: path.write_bytes(whole[: len(whole) // 2])
    yield "one bit flipped", lambda: path.write_bytes(bytes(flipped))
    yield "zeros", lambda: path.write_bytes(bytes(len(whole)))
    yield "noise", lambda: path.write_bytes(random.Random(0).randbytes(len(whole)))
    yield "a folder", folder
    yield "other shapes", other_values
    yield "NaN", not_finite


def small(folder: str, name: str) -> Any:
    """The configuration of a run of four iterations, with a LoRA and an average."""
    changes = [f"output={folder}", f"name={name}", "evaluation.prompts=null", "training.iterations=4"]
    changes += ["training.ema_decay=0.9", "training.checkpoint_every=1", "training.prompts_per_iteration=2"]
    return load(recipe("tiny_sd3/flow_grpo"), changes)


def brightness(images: list[Any], prompts: list[str]) -> list[float]:
    return [image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for image in images]


def checkpoints() -> Iterator[tuple[str, str]]:
    """Of a run with a LoRA and an average."""
    with tempfile.TemporaryDirectory() as scratch:
        config = small(scratch, "run")
        Trainer(config, reward=brightness, progress=False).train()
        kept = Path(scratch) / "run" / "checkpoints"
        stored = Path(scratch) / "stored"
        shutil.copytree(kept, stored)
        older, newest = sorted(path.name for path in stored.iterdir())
        expected = {name: load_file(stored / name / "trainable.safetensors") for name in (older, newest)}
        moments = {name: load_file(stored / name / "optimizer.safetensors") for name in (older, newest)}

        def go_on() -> str:
            trainer = Trainer(config, reward=brightness, resume=True, progress=False)
            name = f"checkpoint-{trainer.iteration:06d}"
            if name not in expected:
                return f"WRONG: iteration {trainer.iteration}"
            own = trainer.learner.state()[0]
            same = all(torch.equal(own["trainable"][n], value) for n, value in expected[name].items())
            same &= all(torch.equal(own["optimizer"][n], value) for n, value in moments[name].items())
            average = load_file(stored / name / "ema.safetensors")
            same &= all(torch.equal(own["ema"][n], value) for n, value in average.items())
            return "WRONG: other weights" if not same else "fine" if name == newest else "passed over"

        for file in sorted(path.name for path in (stored / newest).iterdir()):
            for way, damage in list(damages(kept / newest / file)):
                shutil.rmtree(kept)
                shutil.copytree(stored, kept)
                damage()
                yield f"{file}, {way}", outcome(go_on)
                shutil.rmtree(kept)
                shutil.copytree(stored, kept)


# Kills


def in_a_child(config: Any) -> int:
    """The number of a process that trains as configured, going on where it can."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            Trainer(config, reward=brightness, resume=True, progress=False).train()
        except FlowalignError as error:
            os._exit(error.exit_code)
        except BaseException:
            os._exit(99)
        os._exit(0)
    return child


def result(folder: Path) -> dict[str, Any]:
    """The weights and moments of a run's end, and its metrics without the times."""
    newest = Checkpoints(folder / "checkpoints", 1).newest()
    assert newest is not None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"metrics": [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in lines]}
    for name in ("trainable", "optimizer", "ema"):
        found[name] = {key: value.tolist() for key, value in load_file(newest / f"{name}.safetensors").items()}
    for path in (folder / "lora").iterdir():
        found[path.name] = {key: value.tolist() for key, value in load_file(path).items()}
    return found


def kills(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Runs that SIGKILL and SIGTERM end, each at a random moment of the time that a whole run takes."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        begin = time.monotonic()
        os.waitpid(in_a_child(small(scratch, "whole")), 0)
        whole, expected = time.monotonic() - begin, result(Path(scratch) / "whole")
        done, rounds = 0, 0
        while done < count:
            config, rounds = small(scratch, f"round{rounds}"), rounds + 1
            while True:
                child = in_a_child(config)
                time.sleep(generator.uniform(0, whole))
                number = generator.choice([signal.SIGKILL, signal.SIGTERM])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)
                _, status = os.waitpid(child, 0)
                if status == 0:
                    break
                done += 1
                code = os.waitstatus_to_exitcode(status)
                kind = {-signal.SIGKILL: "killed", -signal.SIGTERM: "killed", 75: "left with a checkpoint"}
                yield f"round {rounds}, signal {done}", kind.get(code, f"TRACEBACK: code {code}")
            same = result(Path(scratch) / str(config.name)) == expected
            yield (
                f"round {rounds}, its end",
                "as in peace" if same else "WRONG: other weights, metrics or files",
            )


# Configurations

VALUES: list[Any] = [
    None, True, "", "x", "x" * 10_000, "a\0b", "a\nb", "../..", "/dev/zero", "rewards.base:score", "\ud800",
    0, -1, 1, 2, 3.5, 1e308, float("inf"), float("-inf"), float("nan"), 2**31, 2**63, -(2**63), 10**30,
    [], [[]], [1, 2], [None], ["x"] * 100, {}, {"name": "x"}, {"name": None}, {"name": "all", "x": 1}, {"": {}},
]  # fmt: skip


def places(values: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested settings."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        yield (*above, key)
        yield from places(value, (*above, key))


def distorted(value: Any, generator: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return generator.choice([*(v for v in VALUES if isinstance(v, int | float)), -value, value + 1, value / 3])
    if isinstance(value, list):
        return generator.choice([value[::-1], value + value, value[1:], [value], [*value, None]])
    if isinstance(value, dict):
        return {key: own for key, own in value.items() if generator.random() < 0.5}
    return generator.choice([value[:-1], value.upper(), f"{value}:{value}", f" {value}", value * 100])


def mutated(values: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """A copy with one to three things replaced, removed, renamed or doubled."""
    values = json.loads(json.dumps(values))
    for _ in range(generator.randint(1, 3)):
        found = list(places(values))
        if not found:
            break
        *above, key = generator.choice(found)
        section: Any = values
        for part in above:
            section = section[part]
        way = generator.choice(["distort"] * 6 + ["replace"] * 3 + ["remove", "rename", "elsewhere"])
        value = generator.choice(VALUES)
        if way == "distort":
            section[key] = distorted(section[key], generator)
        elif way == "replace":
            section[key] = value
        elif way == "remove":
            del section[key]
        elif isinstance(section, dict):
            section[f"{key}s" if way == "rename" else str(generator.choice(found)[-1])] = section[key]
    return values


def configurations(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Recipes that are changed and written to a file."""
    generator = random.Random(seed)
    recipes = sorted(
        path for path in recipe("tiny_sd3/demo").parents[1].rglob("*.yaml") if "accelerate" not in path.parts
    )
    full = {}
    for path in recipes:
        try:
            full[path] = yaml.safe_load(load(path).dump())
            load(path).check(1)
        except FlowalignError:
            full.pop(path, None)  # it needs files of one's own
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "mutated.yaml"
        for number in range(count):
            values = mutated(full[generator.choice(sorted(full))], generator)
            text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False)
            if generator.random() < 0.1:
                place = generator.randrange(len(text))
                text = text[:place] + generator.choice("{}[]:&*!|>%@`\t\0\"'-?#") + text[place + 1 :]
            file.write_text(text, encoding="utf-8", errors="surrogatepass")

            def read() -> str:
                load(file).check(1)
                return "fine"

            yield f"seed {seed}, number {number}", outcome(read)


# Prompts


def prompts() -> Iterator[tuple[str, str]]:
    """Files in every format, each broken in its own way."""
    lines = {
        "a text": b"a cat\n", "nothing": b"", "blanks": b"\n \n\t\n", "NUL": b"a\0b\n", "not UTF-8": b"a \xff\n",
        "UTF-16": "a cat\n".encode("utf-16"), "BOM": b"\xef\xbb\xbfa cat\n", "long": b"x" * 1_000_000, "CR": b"a\rb\r",
        "U+2028": "a\u2028b\n".encode(), "noise": random.Random(0).randbytes(10_000), "surrogate": b"\xed\xa0\x80\n",
        "JSON": b'{"prompt": "a cat"}\n', "a list": b'["a cat"]\n', "null": b"null\n", "a number": b"3\n",
        "no key": b'{"text": "a cat"}\n', "number as prompt": b'{"prompt": 3}\n', "empty prompt": b'{"prompt": ""}\n',
        "half a pair": b'{"prompt": "\\ud800"}\n', "escaped NUL": b'{"prompt": "a\\u0000"}\n',
        "cut": b'{"prompt": "a c', "deep": b"[" * 200_000, "large number": b"9" * 10_000,
        "NaN": b'{"prompt": "a", "x": NaN}\n',
        "twice": b'{"prompt": "a", "prompt": "b"}\n', "missing picture": b'{"prompt": "a", "image": "none.png"}\n',
        "long name": b'{"prompt": "a", "image": "' + b"x" * 5000 + b'"}\n',
        "name with NUL": b'{"prompt": "a", "image": "a\\u0000"}\n',
        "a number as picture": b'{"prompt": "a", "image": 3}\n', "no pictures": b'{"prompt": "a", "image": []}\n',
        "parquet's mark": b"PAR1" + bytes(100) + b"PAR1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for suffix in (".txt", ".jsonl", ".parquet", ".csv"):
            for name, content in lines.items():
                path = Path(scratch) / f"prompts{suffix}"
                path.write_bytes(content)
                yield (
                    f"{suffix}: {name}",
                    outcome(lambda path=path: "fine" if len(Prompts.read(str(path))) else "WRONG"),
                )
        for source in ("/dev/zero", "/dev/stdin", "", "x" * 5000, "a\0b", "\ud800", "../..", "/", "owner/name", "~"):
            yield repr(source[:20]), outcome(partial(read_prompts, source))


def read_prompts(source: str) -> str:
    for text in Prompts.read(source).texts:
        text.encode()
    return "fine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["checkpoints", "kills", "configurations", "prompts"])
    parser.add_argument("--count", type=int, help="of configurations, default 1000, and of kills, default 100")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds = {
        "checkpoints": checkpoints,
        "prompts": prompts,
        "kills": lambda: kills(arguments.count or 100, arguments.seed),
        "configurations": lambda: configurations(arguments.count or 1000, arguments.seed),
    }
    counts: Counter[str] = Counter()
    for case, result in kinds[arguments.what]():
        kind = result.partition(":")[0]
        counts[kind] += 1
        if kind.isupper():
            print(f"{case}: {result}", flush=True)
    print(f"{sum(counts.values())} {arguments.what}:", ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    sys.exit(any(kind.isupper() for kind in counts))


if __name__ == "__main__":
    main()
