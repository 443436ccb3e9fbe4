"""The wheel, installed in an environment of its own: recipes, prompts and models come along, and the demo runs."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel, and of this one the packages that it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    built = subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        capture_output=True,
        text=True,
        env=offline,
    )
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("hatchling, which builds it, is not to be had")
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    paths = sysconfig.get_paths(vars={"base": str(folder / "env"), "platbase": str(folder / "env")})
    # as a path alone: what is installed here for development stays out
    Path(paths["purelib"], "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = Path(paths["scripts"], "python")
    done = subprocess.run(
        [*pip, "--python", python, "install", "--quiet", "--no-deps", wheel], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Path(paths["scripts"])


WHERE = """
import flowalign
from flowalign.config import load
load("tiny_sd3/flow_grpo").check(processes=1)
print(flowalign.__file__)
"""


def test_it_runs_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    def run(program: str, *words: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [installed / program, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    names = {line.split()[0] for line in run("flowalign", "recipes").splitlines()}
    checkout = {f"{file.parent.name}/{file.stem}" for file in (ROOT / "configs").glob("*/*.yaml")}
    assert names == {name for name in checkout if not name.startswith("accelerate/")}
    assert Path(run("python", "-c", WHERE).strip()).is_relative_to(installed.parent)
    run("flowalign", "demo", "--iterations", "1", "--pictures", "20", "--output", "demo")
    for made in ("index.html", "assets/vote.js", "assets/gallery.css"):
        assert (tmp_path / "demo" / "gallery" / made).is_file()
    page = (tmp_path / "demo" / "gallery" / "index.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script', page, re.S)[1])
    # a picture of each of the 20 prompts that are trained and of the 61 others, before and after, of all processes
    assert len(data["rows"]) == 81 and len(data["pictures"]) == 2 * 81
