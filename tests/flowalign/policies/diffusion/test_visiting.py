"""Text encoders visit the device: their weights go there, and the host's are the same tensors after."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.policies.diffusion import DiffusersPolicy, prompts
from flowalign.policies.diffusion.visiting import visiting
from flowalign.training import Trainer

META = torch.device("meta")


def test_weights_go_and_the_hosts_wait() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).requires_grad_(False)
    network[2].weight = network[0].weight
    before = {name: value for name, value in network.state_dict(keep_vars=True).items()}
    values = {name: value.clone() for name, value in before.items()}
    with pytest.raises(KeyError), visiting([network, None], META):
        assert {value.device for value in network.state_dict().values()} == {META}
        assert network[2].weight is network[0].weight and not network[0].weight.requires_grad
        raise KeyError
    after = network.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, values[name]) for name, value in before.items())


def test_prompts_that_are_to_come_are_encoded_in_one_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[int] = []

    @contextmanager
    def visit(networks: object, device: torch.device) -> Iterator[None]:
        assert device == META and networks == encoder.parts
        visits.append(len(encoded))
        yield

    config = load(recipe("tiny_sd3/flow_grpo"), ["training.iterations=12", "training.prompts_per_iteration=2"])
    config = config.model_copy(update={"output": str(tmp_path)})
    policy = DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3")
    trainer = Trainer(config, policy, progress=False)
    encoder, encoded = policy.encoder, []
    encode = encoder._encoded
    monkeypatch.setattr(prompts, "visiting", visit)
    # the weights stay where they are: only the journeys are counted
    monkeypatch.setattr(encoder, "place", META)

    def one(text: str, *rest: object) -> dict[str, torch.Tensor]:
        encoded.append(text)
        encoder.place = torch.device("cpu")
        try:
            return encode(text, *rest)
        finally:
            encoder.place = META

    monkeypatch.setattr(encoder, "_encoded", one)
    drawn = []
    for iteration in range(12):
        texts = list(dict.fromkeys(trainer.groups.draw(iteration).batch.prompts))
        encoder.encode(texts)
        drawn += texts
    assert set(drawn) <= set(encoded) and len(encoded) == len(set(encoded))
    # twelve iterations draw new prompts; two visits serve them
    assert len(visits) == 2
