"""`flowalign env`, and what the command line prints of other libraries: nothing."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from flowalign.app.cli.main import main


def test_versions_devices_and_a_configuration_without_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(
        "rewards: [{name: remote, url: 'http://me:hidden1@host:80', api_key: hidden2}]\nname: sk-hidden3hidden3\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["env", str(tmp_path)])
    assert not left.value.code
    text = capsys.readouterr().out
    said = yaml.safe_load(text.partition("config:")[0])
    assert said["versions"]["torch"] == metadata.version("torch") and said["devices"]
    assert "name: remote" in text and "hidden" not in text


def test_a_dry_run_prints_nothing_of_other_libraries() -> None:
    command = [sys.executable, "-m", "flowalign", "train", "tiny_sd3/demo", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "update" in done.stdout
    # triton's binding reports leaks as the process ends
    assert [line for line in done.stderr.splitlines() if "nanobind" not in line and "leaked" not in line] == []


def test_every_command_stands_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    groups = ("Train", "Look", "Measure", "Votes and rewards", "Text", "Prepare", "Reference")
    assert all(f"─ {group} ─" in text for group in groups) and "─ Commands ─" not in text
