"""The page of rollout servers: its recipes are accepted, its servers are those that learners ask, its bytes add up."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import yaml

from flowalign.config import load
from flowalign.registry import GIVEN
from flowalign.training.engines.servers import in_turn
from flowalign.training.engines.sglang import TOKENS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/rollout-servers.md"
SHOW = """
sglang() { record sglang "$@"; }
curl() { record curl "$@"; }
accelerate() { record accelerate "$@"; }
python3() { :; }
record() { printf '%s\\0' "$@"; printf '\\n\\0'; }
"""
OPTIONS = {"--model-path", "--host", "--port", "--scheduler-port", "--strict-ports"}
"""Read in sglang 0.5.23's runtime/server_args/server_args.py."""


def commands() -> list[list[str]]:
    """The words of every command, as bash runs them with a rank of 3."""
    shown = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    # servers of a loop write to logs, and run beside each other
    script = "".join(shown).replace("~/sglang/bin/", "").replace(" > server-$gpu.log 2>&1 &", "")
    script = script.replace("sglang && pip", "sglang; :")
    done = subprocess.run(["bash", "-euc", f"{SHOW}RANK=3\n{script}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split("\0") for line in done.stdout.split("\0\n\0")[:-1]]


def test_recipes_are_accepted_and_ask_the_servers_that_are_started() -> None:
    served, asked = [], []
    for program, *words in commands():
        if program == "sglang":
            assert words[0] == "serve" and {word for word in words if word.startswith("--")} <= OPTIONS
            served.append(dict(zip(words[1:-1:2], words[2:-1:2], strict=True)))
        elif program == "accelerate":
            file = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())
            at = words.index("train")
            settings = [word for word in words[at + 2 :] if not word.startswith("--")]
            config = load(ROOT / words[at + 1], settings)
            model, engine = config.model.path, config.rollout.engine.served("pictures")[1]
            length = TOKENS["StableDiffusion3Pipeline"] if "diffusion-3" in model else 512
            assert config.model.encode["max_sequence_length"] == length
            # its index is on the hub
            config.model.path = f"{GIVEN}there"
            config.check(file["num_processes"])
            asked.append((model, engine.url, config, file["num_processes"]))
    for model, urls, _, _ in asked:
        ports = [server["--port"] for server in served if server["--model-path"] == model]
        assert len(set(ports)) == len(ports) and {url.rpartition(":")[2] for url in urls} == set(ports), model
    assert [len(urls) for _, urls, _, _ in asked] == [1, 12 * 8]
    # all 96 get as many requests, but for one
    _, urls, config, rows = asked[1]
    requests = config.training.prompts_per_iteration * config.training.group_size // rows
    counts = Counter(in_turn(urls, row, rows)[i % len(urls)] for row in range(rows) for i in range(requests))
    assert len(counts) == 96 and set(counts.values()) == {10, 11}


def test_the_bytes_of_the_table_add_up() -> None:
    rows = re.findall(
        r"^\| ([^|]*\((?:.*: )?([\d,]+)[^|]*\)) \| (\d+) \| (.*) MB \| (.*) MB \| (.*) GB \|$", PAGE.read_text(), re.M
    )
    states = [16 * 64 * 64, 16 * 48 * 48, 16 * 21 * 60 * 104]
    pictures = [3 * 512 * 512, 3 * 384 * 384, 3 * 81 * 480 * 832]
    assert len(rows) == 3
    for (_, samples, steps, answer, more, whole), state, picture in zip(rows, states, pictures, strict=True):
        number = {text: float(text.replace(",", "")) for text in (samples, answer, more, whole)}
        size = 4 * ((int(steps) + 1) * state + picture)
        # the noise, the means and the velocities
        assert (
            abs(number[answer] - size / 1e6) < 0.05
            and abs(number[more] - (size + 12 * int(steps) * state) / 1e6) < 0.06
        )
        assert abs(number[whole] - number[samples] * size / 1e9) < 0.06
