"""What is recorded of a run's environment."""

from importlib import metadata

import pytest

import flowalign
from flowalign.runs import environment


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "flowalign":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(environment, "version", version)
    found = environment.installed(("flowalign", "torch"))
    assert found == {"flowalign": flowalign.__version__, "torch": metadata.version("torch")}
