"""Plans of a direct, a matching, a video and a text recipe beside arithmetic by hand, from published sizes.

A multiplication with its addition counts as two operations. A matrix product of n rows by [a, b] is 2 n a b; attention
of n queries to m keys of width d in all heads is 4 n m d, for scores and for their sum over values. Left out: norms,
activations, time embeddings and modulation, which are one row a sample, and LoRA's own, 1% at rank 32.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from flowalign.config import load, recipe
from flowalign.planning.fake_device import DEVICE, FakeDevice
from flowalign.planning.passes import Passes, count
from flowalign.planning.published_pipelines import PARTS, network
from flowalign.planning.resources import Meter
from flowalign.planning.text_plan import PROMPT_TOKENS, measure


def unet() -> float:
    """Stable Diffusion 1.5 at 64 x 64: widths 320, 640, 1280, 1280 at 64, 32, 16 and 8 (arXiv 2112.10752)."""
    down = [(64, 320, 320)] * 2 + [(32, 320, 640), (32, 640, 640), (16, 640, 1280), (16, 1280, 1280)]
    # two at the lowest resolution on the way down, two in the middle
    middle = [(8, 1280, 1280)] * 4
    # on the way up each block has what skips over beside what comes from below
    up = [(8, 2560, 1280)] * 3 + [(16, 2560, 1280)] * 2 + [(16, 1920, 1280), (32, 1920, 640), (32, 1280, 640)]
    up += [(32, 960, 640), (64, 960, 320), (64, 640, 320), (64, 640, 320)]
    linear = sum(resnet(*block) for block in down + middle + up)
    # three convolutions that halve the size, by the size that comes out, three that double it, and the two ends
    linear += sum(2 * s**2 * 9 * c * c for s, c in ((32, 320), (16, 640), (8, 1280), (16, 1280), (32, 1280), (64, 640)))
    linear += 2 * 64**2 * 9 * (4 * 320 + 320 * 4)
    attention = 0.0
    for s, d in [(64, 320)] * 5 + [(32, 640)] * 5 + [(16, 1280)] * 5 + [(8, 1280)]:
        n, texts = s * s, 77
        # in and out 2 d^2, self attention 4, queries and output of cross attention 2, a gated MLP 8 + 4
        linear += 2 * n * 20 * d * d + 2 * texts * 768 * 2 * d
        attention += 4 * d * n * (n + texts)
    return linear + attention


def resnet(s: int, before: int, after: int) -> float:
    """Two convolutions of 3 x 3 at s x s, and one of 1 x 1 around them where the width changes."""
    return 2 * s * s * (9 * (before * after + after * after) + (before != after) * before * after)


def vae_decoder() -> float:
    """Stable Diffusion's decoder to 512 x 512: widths 512, 512, 256, 128 at 64, 128, 256 and 512, three blocks each."""
    blocks = [(64, 512, 512)] * 5 + [(128, 512, 512)] * 3 + [(256, 512, 256)] + [(256, 256, 256)] * 2
    blocks += [(512, 256, 128)] + [(512, 128, 128)] * 2
    doubling = sum(2 * s**2 * 9 * c * c for s, c in ((128, 512), (256, 512), (512, 256)))
    ends = 2 * 9 * (64**2 * 4 * 512 + 512**2 * 128 * 3)
    attention = 2 * 64**2 * 4 * 512**2 + 4 * 512 * 64**4
    return sum(resnet(*block) for block in blocks) + doubling + ends + attention


def mmdit() -> float:
    """Stable Diffusion 3.5 medium at 512 x 512: 24 blocks of width 1536, 13 with a second attention of the picture."""
    d, blocks, second = 1536, 24, 13
    # latents of 64 x 64 in patches of 2 x 2; 77 tokens of CLIP and 128 of T5, which are 4096 wide
    n, m = 32 * 32, 77 + 128
    # attention 4 d^2, MLP 8 d^2 in each stream; the last block has queries, keys and values of the text alone
    linear = 2 * (blocks * 12 * d**2 * n + (blocks - 1) * 12 * d**2 * m + 3 * d**2 * m + second * 4 * d**2 * n)
    linear += 2 * (4096 * d * m + 2 * 16 * 4 * d * n)
    attention = 4 * d * (blocks * (n + m) ** 2 + second * n**2)
    return linear + attention


def wan() -> float:
    """Wan 2.1 1.3B, 33 frames of 416 x 240: 30 blocks of width 1536, MLPs of 8960 (arXiv 2503.20314, table 2)."""
    d, blocks, mlp = 1536, 30, 8960
    # 9 latent frames of 30 x 52 in patches of 2 x 2; 512 tokens of UMT5, which are 4096 wide
    n, m = 9 * 15 * 26, 512
    # self attention 4 d^2, queries and output of cross attention 2 d^2, keys and values of the text 2 d^2
    linear = 2 * blocks * (6 * d**2 * n + 2 * d**2 * m + 2 * d * mlp * n)
    linear += 2 * ((4096 * d + d**2) * m + 2 * 16 * 4 * d * n)
    return linear + 4 * d * blocks * n * (n + m)


def qwen2(tokens: int, keys: int, drawn: int, layers: int = 28) -> tuple[float, float, float, float]:
    """Qwen2 7B: layers of width 3584, 28 heads, 4 of keys and values, gated MLPs of 18944 (arXiv 2407.10671, table 1).

    Args:
        tokens: that go through the layers, each attending to `keys`.
        drawn: that go through the head.

    Returns:
        operations of the layers' products, of those the MLPs' last, of attention and of the head.
    """
    d, mlp, vocabulary = 3584, 18944, 152064
    # queries and output 2 d^2, keys and values of 4 x 128
    layer = 2 * tokens * (2 * d * d + 2 * d * 512 + 3 * d * mlp)
    return layers * layer, layers * 2 * tokens * d * mlp, layers * 4 * tokens * keys * d, 2 * drawn * d * vocabulary


def kept_by_the_decoder() -> float:
    """Bytes that the decoder keeps for the gradient to its latents, in 16 bits: 3 (before + after) s^2 numbers a block.

    Of each of a block's two parts the input of the norm, that of the activation and that of the convolution.
    """
    blocks = [(64, 512, 512)] * 5 + [(128, 512, 512)] * 3 + [(256, 512, 256)] + [(256, 256, 256)] * 2
    blocks += [(512, 256, 128)] + [(512, 128, 128)] * 2
    numbers = sum(3 * (before + after) * s * s for s, before, after in blocks)
    # what the convolutions after each doubling are given, and the last norm, activation and convolution
    numbers += sum(c * s * s for s, c in ((128, 512), (256, 512), (512, 256))) + 3 * 128 * 512**2
    return 2 * numbers


def blank(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device=DEVICE)


def test_a_pass_of_each_network_is_what_its_sizes_say() -> None:
    def text(length: int, width: int) -> dict[str, torch.Tensor]:
        return {"encoder_hidden_states": blank(1, length, width), "timestep": blank(1)}

    with FakeDevice() as device:
        meter = Meter(device, torch.float32)
        for name, latents, inputs, expected in (
            ("sd15", (4, 64, 64), text(77, 768), unet()),
            ("sd35_medium", (16, 64, 64), text(205, 4096) | {"pooled_projections": blank(1, 2048)}, mmdit()),
            ("wan_1_3b", (16, 9, 30, 52), text(512, 4096), wan()),
        ):
            denoiser = network(name)
            found = meter(lambda: denoiser(blank(1, *latents), **inputs), grad=False)  # noqa: B023
            assert found.flops == pytest.approx(expected, rel=2e-3), name


def test_the_decoders_pass_and_its_gradient_are_what_its_sizes_say() -> None:
    with FakeDevice() as device:
        decoder = network("sd15_vae").requires_grad_(False).bfloat16()
        latents = blank(1, 4, 64, 64).bfloat16().requires_grad_()
        meter = Meter(device, torch.float32)
        assert meter(lambda: decoder.decode(latents), grad=False).flops == pytest.approx(vae_decoder(), rel=1e-3)
        found = meter(lambda: decoder.decode(latents).sample.sum().backward())
    # its weights are frozen, so that backwards is as much as forwards
    assert found.flops == pytest.approx(2 * vae_decoder(), rel=0.03)
    assert found.peak == pytest.approx(kept_by_the_decoder(), rel=0.05)


def test_a_text_takes_what_its_sizes_say() -> None:
    prompt, drawn = PROMPT_TOKENS, 1024
    length, layers = prompt + drawn, 2
    with mock.patch.dict(PARTS["qwen2_7b"], num_hidden_layers=layers):
        costs = measure(load(recipe("qwen/grpo")))
    products, down, attention, head = qwen2(length, length, drawn, layers)
    assert costs.forward == pytest.approx(products + attention + head, rel=1e-3)
    # every weight is trained: twice as much backwards; recomputed is all but what nothing needs again, the last product
    backward = 2 * (products + head) + 2.5 * attention
    assert costs.learned == pytest.approx(2 * costs.forward + backward - down, rel=5e-3)
    assert costs.prompt == pytest.approx(sum(np.delete(qwen2(prompt, prompt, 1, layers), 1)), rel=1e-3)
    for keys, found in zip((prompt + 1, length), costs.decoded, strict=True):
        assert found == pytest.approx(sum(np.delete(qwen2(1, keys, 1, layers), 1)), rel=1e-3)
    # transformers turns keys in float32 where the weights are, and its cache keeps values as it keeps keys
    assert costs.cache == layers * length * 2 * 4 * 128 * 4
    # in autocast every product's weights are there in 16 bits too, from the first step to the last
    assert costs.read == 2 * (layers * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 3584 * 152064)
    assert costs.decoding[0] == pytest.approx(costs.read, rel=0.01)


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        # 50 steps with guidance; in the last one the policy, once more for its gradient, and the start
        ("sd15/draft_plus", Passes(rollout=2 * 50, update=2 * 3, backward=2, differentiated=1)),
        # 10 steps without guidance, one evaluation each; at 9 levels the policy, the old weights and the start
        ("sd3/nft", Passes(rollout=10, update=9 * 3, backward=9, decoded=1)),
        # 20 steps with guidance; all but the last are trained, for a divergence from the start
        ("wan/flow_grpo", Passes(rollout=2 * 20, update=2 * 19 * 2, backward=2 * 19, decoded=1)),
        # 7 chunks, each in the one step that is drawn first; 5 updates of the fake score, the generator's chunks, and
        # the fake and the guided teacher about what it made
        ("skyreels_v2/self_forcing", Passes(rollout=7, update=5 + 7 + 1 + 2, backward=5 + 7, decoded=1)),
    ],
)
def test_passes_of_a_sample_are_what_its_method_says(name: str, passes: Passes) -> None:
    assert count(load(recipe(name))) == passes
