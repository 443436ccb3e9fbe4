"""Damage what flowalign reads, and count how it takes it: python scripts/fault_injection.py checkpoints

    commands         command lines that work, with words changed, left out, doubled and mixed
    checkpoints      the newest of a small run's two, in nine ways a file; then the run is to go on
    configurations   the shipped recipes with random changes; they are read and checked, and no model loads
    kills            a small run, killed and asked to leave at random moments until it is done, against one in peace
    prompts          files of prompts that are broken in every way thought of
    server           a reward server, with requests that would take its memory; what it took stands beside each
    workers          runs with a rollout worker, of which it, Ray's head, Ray's other process or the learner is killed

Outcomes: 'fine', 'refused' in one line, 'passed over' for the checkpoint before, and what must not be: 'WRONG' weights,
'TRACEBACK', 'HANGS' (over a minute). Leaves with 1 where one of these came up, and lists them.
"""

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.numpy import save
from safetensors.torch import load_file, save_file

from flowalign.app.cli.main import main as flowalign
from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.errors import FlowalignError
from flowalign.runs.checkpoint import Checkpoints
from flowalign.training import Trainer
from rewards import RewardError
from rewards.wire import JSON, SAFETENSORS, encode

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


def small(folder: str, name: str, of: str = "tiny_sd3/flow_grpo", more: Sequence[str] = ()) -> Any:
    """The configuration of a run of four iterations, with an average of its weights."""
    changes = [f"output={folder}", f"name={name}", "evaluation.prompts=null", "training.iterations=4"]
    changes += ["training.ema_decay=0.9", "training.checkpoint_every=1", "training.prompts_per_iteration=2"]
    return load(recipe(of), [*changes, *more])


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


def in_a_child(config: Any, processes: int) -> int:
    """The number of a process that trains as configured, going on where it can; the first of its group."""
    if processes > 1:
        file = Path(config.output) / f"{config.name}.yaml"
        file.write_text(config.dump())
        launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
        command = [sys.executable, *launch, "-m", "flowalign", "train", str(file), "--resume"]
        quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet, setsid=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            Trainer(config, resume=True, progress=False).train()
        except FlowalignError as error:
            os._exit(error.exit_code)
        except BaseException:
            os._exit(99)
        os._exit(0)
    return child


APART = ("seconds", "workers/")
"""metrics that say how a run went, not what it learned"""


def result(folder: Path) -> dict[str, Any]:
    """The weights and moments of a run's end, and its metrics without the times."""
    newest = Checkpoints(folder / "checkpoints", 1).newest()
    assert newest is not None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"metrics": [{k: v for k, v in r.items() if not k.startswith(APART)} for r in lines]}
    for path in [
        *newest.glob("*.safetensors"),
        *folder.glob("lora/*.safetensors"),
        *folder.glob("model/*.safetensors"),
    ]:
        found[path.name] = {key: value.tolist() for key, value in load_file(path).items()}
    return found


def kills(count: int, seed: int, name: str, changes: list[str], processes: int) -> Iterator[tuple[str, str]]:
    """Runs that SIGKILL and SIGTERM end, each at a random moment of the time that a whole run takes."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        begin = time.monotonic()
        os.waitpid(in_a_child(small(scratch, "whole", name, changes), processes), 0)
        whole, expected = time.monotonic() - begin, result(Path(scratch) / "whole")
        done, rounds = 0, 0
        while done < count:
            config, rounds = small(scratch, f"round{rounds}", name, changes), rounds + 1
            while True:
                child = in_a_child(config, processes)
                time.sleep(generator.uniform(0, whole))
                number = generator.choice([signal.SIGKILL, signal.SIGTERM])
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, number)
                _, status = os.waitpid(child, 0)
                if status == 0:
                    break
                done += 1
                code = os.waitstatus_to_exitcode(status)
                kind = {-signal.SIGKILL: "killed", -signal.SIGTERM: "killed", 75: "left with a checkpoint"}
                # a launcher has codes of its own
                other = f"TRACEBACK: code {code}" if processes == 1 else "killed"
                yield f"round {rounds}, signal {done}", kind.get(code, other)
            same = result(Path(scratch) / str(config.name)) == expected
            yield (
                f"round {rounds}, its end",
                "as in peace" if same else "WRONG: other weights, metrics or files",
            )


def of_run(learner: int, name: str) -> int:
    """The number of the learner's process, or of one of this name that it started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    own = {learner}
    while more := {int(pid) for pid, parent, _ in rows if int(parent) in own} - own:
        own |= more
    return next(int(pid) for pid, _, command in rows if int(pid) in own and name in command.split()[0])


def workers(name: str, changes: list[str]) -> Iterator[tuple[str, str]]:
    """Runs of which a process is killed once an iteration is over, and which go on where that ended them."""
    changes = [*changes, "training.iterations=20"]
    with tempfile.TemporaryDirectory() as scratch:
        os.waitpid(in_a_child(small(scratch, "whole", name, changes), 1), 0)
        expected = result(Path(scratch) / "whole")
        for victim, process in (
            ("worker", "ray::RolloutWorker"),
            ("head", "gcs_server"),
            ("raylet", "raylet"),
            ("learner", ""),
        ):
            config = small(scratch, victim, name, [*changes, "rollout.workers={count: 1}"])
            folder = Path(scratch) / str(config.name)
            child = in_a_child(config, 1)
            while not (folder / "metrics.jsonl").is_file():
                time.sleep(0.01)
            os.kill(of_run(child, process) if process else child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            kind = {0: "went on", 75: "left in one line", -signal.SIGKILL: "killed"}
            yield f"{victim}, killed", kind.get(code, f"TRACEBACK: code {code}")
            if code != 0:
                os.waitpid(in_a_child(config, 1), 0)
            same = result(folder) == expected
            yield f"{victim}, the end", "as in peace" if same else "WRONG: other weights or metrics"


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
        for source in ("/dev/zero", "/dev/stdin", "", "x" * 5000, "a\0b", "\ud800", "/", "~"):
            yield repr(source[:20]), outcome(partial(read_prompts, source))


COMMANDS = """
list rewards clip_score
config rollout --text
recipes
init --model tiny_sd3 --reward shapes --prompts prompts.txt --output train.yaml --guidance 2
fetch tiny_sd3/flow_grpo --check
train tiny_sd3/flow_grpo training.iterations=1 training.group_size=2 evaluation.prompts=null name=new --dry-run
sample tiny_sd3 "a red circle" "two blue squares" --steps 2 --count 2 --seed 3 --output samples
sample runs/run "a red circle" --steps 2 --output samples --rlg 1.5
search tiny_sd3 "a red circle" --method best_of_n --reward shapes --budget samples=2 --steps 2 --output searches
eval runs/run --base --prompts prompts.txt --steps 2 --json figures.json
watch runs/run --panel shapes --json figures.json
gallery runs/run --output gallery --export votes.jsonl
pairs tiny_sd3 prompts.txt --per-prompt 2 --steps 2 --output pairs
prompts geneval --count 3 --output geneval.jsonl --seed 1
difficulty tiny_sd3/flow_grpo graded.jsonl rollout.steps=2 data.limit=2 --samples 2
reward-check rewards.yaml --size 32
train-reward votes.jsonl --out judge --epochs 1 --batch-size 2 --min-pairs 1
pair-questions votes.jsonl --out questions.jsonl --template reward_dance_pair
league tiny_sd3/flow_grpo tiny_sd3/nft --budget forwards=1 --seeds 1 --pictures 1 --output league
cold-start tiny_lm/grpo --out started --epochs 1
rejection-sampling tiny_lm/grpo --out right --samples 1
reward-server rewards.yaml --host 127.0.0.1 --port 8790
"""
LONG = {"train", "league", "difficulty", "cold-start", "rejection-sampling", "reward-server", "search", "eval", "pairs"}
"""may work for longer than anybody waits here, or serve"""
WORDS = [
    "", " ", "-", "--", "0", "-1", "1e309", "nan", "x" * 5000, "../..", "/dev/zero", "/dev/null", "\ud800", "a\0b",
    "=", "a=b", "%s", "{}", "[1", "9" * 30, "2**9", "'", "~", ".", "/", "--help", "--json", "--serve", "http://[",
]  # fmt: skip


def altered(words: list[str], others: list[str], generator: random.Random) -> list[str]:
    """A copy with one to three of its words changed."""
    words = list(words)
    for _ in range(generator.randint(1, 3)):
        place = generator.randrange(len(words))
        way = generator.choice(["replace"] * 4 + ["drop", "double", "insert", "cut", "swap", "other", "mangle"])
        if way == "replace":
            words[place] = generator.choice(WORDS)
        elif way == "drop" and len(words) > 1:
            del words[place]
        elif way == "double":
            words.insert(place, words[place])
        elif way == "insert":
            words.insert(place, generator.choice(WORDS))
        elif way == "cut":
            del words[max(1, place) :]
        elif way == "swap":
            other = generator.randrange(len(words))
            words[place], words[other] = words[other], words[place]
        elif way == "other":
            words[place] = generator.choice(others)
        else:
            at = generator.randrange(len(words[place]) + 1)
            words[place] = words[place][:at] + generator.choice("=-/.,:x9\t\u00e9") + words[place][at + 1 :]
    return words


def commands(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Each in this process, in a folder that has a run, prompts and rewards."""
    generator = random.Random(seed)
    known = [shlex.split(line) for line in COMMANDS.strip().splitlines()]
    others = [word for line in known for word in line]
    kept = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Trainer(small("runs", "run"), reward=brightness, progress=False).train()
        Path("prompts.txt").write_text("a red circle\n\na blue square\n")
        Path("rewards.yaml").write_text("rewards: [{name: shapes}]\n")
        shutil.copytree(scratch, f"{scratch}.kept")
        for number in range(count):
            words = altered(generator.choice(known), others, generator)
            said, shown = io.StringIO(), io.StringIO()

            def run(words: list[str] = words, said: io.StringIO = said, shown: io.StringIO = shown) -> str:
                try:
                    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
                        flowalign(words)
                except SystemExit as end:
                    if end.code and not (said.getvalue() + shown.getvalue()).strip():
                        return f"SILENT: code {end.code}"
                    return "refused" if end.code else "fine"
                return "fine"

            ended = outcome(run)
            at_work = ended == "HANGS" and not LONG.isdisjoint(words)
            yield f"seed {seed}, number {number}: flowalign {shlex.join(words)!r}", "at work" if at_work else ended
            # what a command wrote is in no other's way
            os.chdir(kept)
            shutil.rmtree(scratch)
            shutil.copytree(f"{scratch}.kept", scratch)
            os.chdir(scratch)
        shutil.rmtree(f"{scratch}.kept")


GIGABYTE = 2**30
"""more than a server with its default `memory` may take for one request"""
MANY = GIGABYTE + 384 * 2**20
"""and for many at once: its own half a gigabyte and twice `memory`, since what is freed stays in pieces"""


def bombs() -> Iterator[tuple[str, Any, str]]:
    """What to send: a name, a body, or its pieces, and its content type."""
    picture = Image.new("RGB", (1024, 1024))
    repeated = json.dumps({"samples": [{"$image": 0}] * 1000, "prompts": ["a"] * 1000, "metadata": [{}] * 1000})
    tensors = {"0": np.zeros((1024, 1024, 3), np.uint8), "request": np.frombuffer(repeated.encode(), dtype=np.uint8)}
    yield "3 MB that repeat one picture 1,000 times", save(tensors), SAFETENSORS
    large = io.BytesIO()
    Image.new("L", (13_000, 13_000)).save(large, "PNG")
    png = {"$png": base64.b64encode(large.getvalue()).decode()}
    four = {"samples": [png] * 4, "prompts": ["a"] * 4, "metadata": [{}] * 4}
    yield "four PNGs of 13,000 pixels a side", json.dumps(four).encode(), JSON
    hidden = {"samples": ["a"], "prompts": ["a"], "metadata": [{"more": [png] * 4}]}
    yield "the same in metadata", json.dumps(hidden).encode(), JSON
    yield "100 pictures of 1,024 pixels", *encode([picture] * 100, ["a"] * 100, [{}] * 100, "safetensors")
    lists = b'{"samples":[' + b"[]," * 20_000_000 + b'1],"prompts":[],"metadata":[]}'
    yield "20 million lists", lists, JSON
    yield "20 million lists in a header", len(lists).to_bytes(8, "little") + lists, SAFETENSORS
    yield "lists in lists, a million deep", b'{"samples":' + b"[" * 1_000_000, JSON
    yield "500 MB of blanks", b" " * (500 << 20), JSON
    yield "an endless body in pieces", (b" " * 2**20 for _ in range(4096)), JSON
    yield "a header of 2**60 bytes", (2**60).to_bytes(8, "little") + b"{}", SAFETENSORS
    yield (
        "a tensor that is not there",
        (75).to_bytes(8, "little") + (b'{"request": {"dtype": "U8", "shape": [999999], "data_offsets": [0, 999999]}}'),
        SAFETENSORS,
    )
    yield "noise", random.Random(0).randbytes(2**20), JSON
    yield "noise as safetensors", random.Random(0).randbytes(2**20), SAFETENSORS
    yield "samples of other types", json.dumps({"samples": [3], "prompts": ["a"], "metadata": [{}]}).encode(), JSON
    yield "a number of a million digits", b'{"samples": [' + b"9" * 1_000_000 + b"]}", JSON
    yield "a picture without pixels", *encode([Image.new("RGB", (1, 1))], ["a"], [{}], "png")


def ask(port: int, body: Any, kind: str) -> str:
    """The status of the answer, or how the connection ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", "/score", body, {"Content-Type": kind})
        return str(connection.getresponse().status)
    except (ConnectionError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def peak(process: int) -> int:
    """Bytes that a process has had in memory at once since the last call."""
    status = Path(f"/proc/{process}/status").read_text()
    most = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return most * 1024


def server() -> Iterator[tuple[str, str]]:
    """A server process of this machine (Linux); after each request it must answer a good one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "rewards.yaml"
        config.write_text("rewards: [{name: shapes}]\n")
        process = subprocess.Popen(
            [sys.executable, "-m", "flowalign", "reward-server", str(config), "--port", str(port)]
        )
        small_one = encode([Image.new("RGB", (64, 64))], ["a red circle"], [{}], "png")
        quiet = encode([Image.new("RGB", (1024, 1024))] * 16, ["a"] * 16, [{}] * 16, "safetensors")
        try:
            while ask(port, *small_one) == "ConnectionRefusedError":
                time.sleep(0.2)

            def sent(many: int, body: Any, kind: str, most: int) -> str:
                peak(process.pid)
                with ThreadPoolExecutor(many) as threads:
                    said = Counter(threads.map(lambda _: ask(port, body, kind), range(many)))
                taken, after = peak(process.pid), ask(port, *small_one)
                shown = f"{', '.join(f'{n} x {status}' for status, n in said.items())}; {taken >> 20} MB"
                if process.poll() is not None or after not in ("200", "422"):
                    return f"DEAD: {shown}, then {after}"
                return f"TOO MUCH: {shown}" if taken > most else f"fine: {shown}"

            for name, body, kind in bombs():
                yield name, outcome(partial(sent, 1, body, kind, GIGABYTE))
            yield "48 requests of 50 MB at once", outcome(partial(sent, 48, *quiet, MANY))
        finally:
            process.kill()
            process.wait()


def read_prompts(source: str) -> str:
    for text in Prompts.read(source).texts:
        text.encode()
    return "fine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=["checkpoints", "commands", "kills", "configurations", "prompts", "server", "workers"]
    )
    parser.add_argument(
        "--count", type=int, help="of configurations, default 1000, of commands, default 500, of kills, default 100"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="tiny_sd3/flow_grpo", help="of the runs that are killed")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="in that recipe")
    parser.add_argument("--processes", type=int, default=1, help="of the runs that are killed")
    arguments = parser.parse_args()
    kinds = {
        "checkpoints": checkpoints,
        "prompts": prompts,
        "server": server,
        "workers": lambda: workers(arguments.recipe, arguments.set),
        "commands": lambda: commands(arguments.count or 500, arguments.seed),
        "kills": lambda: kills(
            arguments.count or 100, arguments.seed, arguments.recipe, arguments.set, arguments.processes
        ),
        "configurations": lambda: configurations(arguments.count or 1000, arguments.seed),
    }
    counts: Counter[str] = Counter()
    for case, result in kinds[arguments.what]():
        kind = result.partition(":")[0]
        counts[kind] += 1
        if kind.isupper() or arguments.what in ("server", "workers"):
            print(f"{case}: {result}", flush=True)
    print(f"{sum(counts.values())} {arguments.what}:", ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    sys.exit(any(kind.isupper() for kind in counts))


if __name__ == "__main__":
    main()
