"""The file that describes tiny models says nothing in vain, and the same name gives the same weights."""

import torch

from flowalign.planning.tiny_pipelines import DATA, PIPELINES, build, part


def test_every_part_is_used_and_every_hub_name_is_a_pipelines() -> None:
    used = {value for tiny in PIPELINES.values() for value in tiny.components.values() if isinstance(value, str)}
    inner = [value for described in DATA["parts"].values() for value in described.values() if isinstance(value, dict)]
    used |= {described["like"] for described in [*DATA["parts"].values(), *inner] if "like" in described}
    assert set(DATA["parts"]) - used == {"byte_llama"}
    assert set(DATA["hub_names"].values()) <= set(PIPELINES)


def test_a_part_changes_what_it_is_like() -> None:
    plain, chat = part("words"), part("words_vision")
    assert plain.chat_template is None and "content" in chat.chat_template
    assert len(chat) == len(plain) + 4


def test_the_same_name_gives_the_same_weights() -> None:
    first, torch_state = build("sd35").transformer.state_dict(), torch.get_rng_state()
    again = build("sd35").transformer.state_dict()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(torch.equal(again[name], weight) for name, weight in first.items())


def test_a_call_takes_the_pictures_it_is_said_to() -> None:
    pictures, mask = [object(), object()], object()
    assert PIPELINES["flux2_reference"].source_inputs(pictures, None) == {"image": pictures}
    fills = {"image": pictures[0], "mask_image": mask, "strength": 1.0}
    assert PIPELINES["sd15_inpaint"].source_inputs(pictures, mask) == fills
    assert PIPELINES["ltx_i2v"].source_inputs(pictures, None) == {"image": pictures[0]}
