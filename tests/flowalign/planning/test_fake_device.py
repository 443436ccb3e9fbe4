"""A device without hardware: what is waited for there, and how much memory its tensors have."""

from collections.abc import Iterator

import pytest
import torch

from flowalign.planning.fake_device import DEVICE, FakeDevice


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as made:
        yield made


def test_values_of_the_device_are_waited_for_and_mixing_raises(device: FakeDevice) -> None:
    there, here = torch.zeros(4, device=DEVICE), torch.arange(4.0)
    for read in (lambda: there.sum().item(), lambda: there[there > 0], lambda: there.cpu(), lambda: here.to(DEVICE)):
        before = len(device.waits)
        read()
        assert len(device.waits) == before + 1
    assert here.to(DEVICE, non_blocking=True).device == DEVICE and len(device.waits) == 4
    # torch refuses the first by itself, and not the others
    square, rows = torch.zeros(4, 4, device=DEVICE), torch.tensor([0, 1])
    for mix in (lambda: there + here, lambda: square @ torch.ones(4, 4), lambda: square.index_select(0, rows)):
        with pytest.raises(RuntimeError, match="device"):
            mix()


def test_memory_is_that_of_the_tensors_alive(device: FakeDevice) -> None:
    kept = torch.zeros(1000, device=DEVICE)
    assert device.live == 4000
    for _ in range(3):
        kept = kept + 1
    assert device.live == 4000 and device.peak == 8000
    # what the host sent is known there
    for sent in (torch.tensor([2, 3]).to(DEVICE), torch.tensor([2, 3], device=DEVICE)):
        assert sent.cumsum(0).tolist() == [2, 5]
