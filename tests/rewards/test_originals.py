"""Our rewards against the authors' own code on the same weights, pictures and prompts (originals/README.md)."""

import importlib.util
import json
from pathlib import Path

import open_clip
import PIL
import pytest
import torch
from packaging import version
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rewards import DifferentiableReward, score, spec_of
from rewards.aesthetic import Aesthetic, AestheticV25, LinearHead
from rewards.clip import HPSv2, PickScore
from rewards.clip_t5 import ClipT5Score
from rewards.clip_t5 import read_question as clip_t5_question
from rewards.edit_reward import EditReward, read_questions
from rewards.hpsv3 import CONSTANTS, HPSv3, HPSv3Plus
from rewards.image_reward import ImageReward
from rewards.qwen import QwenReward
from rewards.rated import DeQA, QAlign
from rewards.rated import read_question as rating_question
from rewards.wording import wording
from tests.rewards.test_pixels import check_pixels

ORIGINALS = Path(__file__).parent / "originals"
SPEC = importlib.util.spec_from_file_location("originals_inputs", ORIGINALS / "inputs.py")
inputs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(inputs)
RECORDED = json.loads((ORIGINALS / "scores.json").read_text())
CLOSE = 1e-4 if version.parse(PIL.__version__).major >= 13 else 3e-3
"""Share of a score that may differ; Pillow before 13 resizes columns first, and some pixels are another grey then."""
METADATA = [{"reference": image} for image in inputs.pictures()[::-1]]
"""what edits are compared with"""


def fill(state):
    """The inputs' weights in the shapes of a state."""
    shapes = {name: tuple(t.shape) for name, t in state.items() if t.is_floating_point()}
    return {name: torch.from_numpy(array) for name, array in inputs.weights(shapes).items()}


def open_clip_folder(folder, config):
    """A small open_clip model whose weights are the inputs', and these weights."""
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    name = f"local-dir:{folder}"
    tensors = fill(open_clip.create_model(name, load_weights=False).state_dict())
    save_file(tensors, folder / "open_clip_model.safetensors")
    return name, tensors


def pick_score(folder):
    inputs.write_clip_folder(folder / "pick")
    network = CLIPModel(CLIPConfig.from_pretrained(folder / "pick"))
    network.load_state_dict(fill(network.state_dict()))
    network.save_pretrained(folder / "pick")
    return PickScore(str(folder / "pick"), processor=None, batch_size=2, device="cpu")


def hpsv2(folder):
    name, tensors = open_clip_folder(folder / "hps", inputs.HPS)
    # the published file is of this kind
    torch.save({"epoch": 1, "state_dict": tensors}, folder / "hps.pt")
    return HPSv2(model=name, weights=str(folder / "hps.pt"), batch_size=2, device="cpu")


def aesthetic(folder):
    torch.save(fill(LinearHead(inputs.AESTHETIC["embed_dim"]).state_dict()), folder / "head.pth")
    name, _ = open_clip_folder(folder / "clip", inputs.AESTHETIC)
    return Aesthetic(str(folder / "head.pth"), model=name, backend="open_clip", batch_size=2, device="cpu")


def image_reward(folder):
    """From a checkpoint with the authors' names, as they publish it."""
    torch.save(fill(checkpoint_shapes()), folder / "ImageReward.pt")
    (folder / "bert").mkdir()
    (folder / "bert" / "vocab.txt").write_text("\n".join(inputs.BERT_VOCABULARY))
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return ImageReward(str(folder / "ImageReward.pt"), str(folder / "bert"), batch_size=2, device="cpu")


def qwen_tensors(folder, extra, markers=1):
    """The tensors of a checkpoint on a small Qwen-VL, with the names of the published ones, and `extra` shapes."""
    config = AutoConfig.from_pretrained(folder)
    config.text_config.vocab_size = 256 + len(inputs.QWEN_SPECIAL) + markers  # no spare rows
    named = dict(extra)
    for name, tensor in AutoModelForImageTextToText.from_config(config).state_dict().items():
        if config.model_type == "qwen2_vl":  # published before transformers renamed
            name = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        named[name] = tuple(tensor.shape)
    return fill({name: torch.empty(shape) for name, shape in named.items()})


def ranking_shapes(name, width=64):
    """Of the head that HPSv3 and its kin have."""
    sizes = ((0, width, 1024), (3, 1024, 16), (5, 16, 2))
    return {key: shape for n, *own in sizes for key, shape in linear(f"{name}.{n}", *own).items()}


def hpsv3(folder):
    inputs.write_qwen_folder(folder / "qwen")
    save_file(qwen_tensors(folder / "qwen", ranking_shapes("rm_head")), folder / "HPSv3.safetensors")
    weights, base = str(folder / "HPSv3.safetensors"), str(folder / "qwen")
    return HPSv3(weights=weights, base=base, batch_size=2, device="cpu", dtype="float32")


def hpsv3_plus(folder, **settings):
    inputs.write_qwen_folder(folder / "qwen3", inputs.QWEN3, inputs.QWEN3_PICTURES, "Qwen3VLProcessor")
    extra = ranking_shapes("rm_head") | linear("cap_encoder.proj", 64, 32) | linear("cap_encoder.pool_attn", 32, 1)
    extra |= linear("cap_encoder.out_proj", 32, 1) | linear("cond_encoder.0", 2, 32) | linear("cond_encoder.2", 32, 32)
    extra |= linear("film_gen.0", 32, 64) | linear("film_gen.2", 64, 128)
    torch.save(qwen_tensors(folder / "qwen3", extra), folder / "hpsv3++.pth")
    weights, base = str(folder / "hpsv3++.pth"), str(folder / "qwen3")
    return HPSv3Plus(weights=weights, base=base, batch_size=2, device="cpu", dtype="float32", **settings)


def edit_reward(folder):
    inputs.write_qwen_folder(folder / "qwen25", inputs.QWEN25, processor="Qwen2_5_VLProcessor")
    extra = ranking_shapes("rm_heads.head_0") | ranking_shapes("rm_heads.head_1")
    save_file(qwen_tensors(folder / "qwen25", extra), folder / "model.safetensors")
    weights, base = str(folder / "model.safetensors"), str(folder / "qwen25")
    return EditReward(weights=weights, base=base, batch_size=2, device="cpu", dtype="float32")


def aesthetic_v25(folder):
    inputs.write_json(folder / "siglip", config=inputs.SIGLIP, preprocessor_config=inputs.SIGLIP_PICTURES)
    inputs.write_byte_tokenizer(folder / "siglip", "$A </s>")
    network = SiglipModel(SiglipConfig.from_pretrained(folder / "siglip"))
    network.load_state_dict(fill(network.state_dict()), strict=False)
    network.save_pretrained(folder / "siglip")
    sizes = (64, 1024, 128, 64, 16, 1)
    shapes = {}
    for number, pair in zip((0, 2, 4, 6, 8), zip(sizes, sizes[1:])):
        shapes |= linear(f"layers.scoring_head.{number}", *pair)
    head = fill({name: torch.empty(shape) for name, shape in shapes.items()})
    torch.save({name.removeprefix("layers."): tensor for name, tensor in head.items()}, folder / "v25.pth")
    return AestheticV25(str(folder / "v25.pth"), str(folder / "siglip"), batch_size=2, device="cpu")


def clip_t5(folder):
    """From a checkpoint in two files, as it is published."""
    inputs.write_clip_folder(folder / "clip")
    inputs.write_byte_tokenizer(folder / "t5", "$A </s>")
    inputs.write_json(folder / "model", config=inputs.T5)
    vision = CLIPModel(CLIPConfig.from_pretrained(folder / "clip")).vision_model.state_dict()
    named = {f"vision_tower.vision_tower.vision_model.{name}": tensor for name, tensor in vision.items()}
    named |= T5ForConditionalGeneration(T5Config(**inputs.T5)).state_dict()
    projector = linear("mm_projector.0", 64, 64) | linear("mm_projector.2", 64, 64)
    tensors = fill(named | {name: torch.empty(shape) for name, shape in projector.items()})
    # one table of words under four names; in the record the last was read last
    words = fill({"embed_tokens.weight": tensors["shared.weight"]})["embed_tokens.weight"]
    for owner in ("", "encoder.", "decoder."):
        tensors[f"{owner}embed_tokens.weight"] = words
    tensors["shared.weight"] = words
    vision_names = [name for name in tensors if name.startswith("vision")]
    for file, names in (
        ("pytorch_model-1.bin", vision_names),
        ("pytorch_model-2.bin", [name for name in tensors if name not in vision_names]),
    ):
        torch.save({name: tensors[name] for name in names}, folder / "model" / file)
    files = {"model": str(folder / "model"), "tower": str(folder / "clip"), "tokenizer": str(folder / "t5")}
    return ClipT5Score(**files, batch_size=2, device="cpu", dtype="float32")


def owl_folder(folder):
    """A small mPLUG-Owl2 with the names of the published ones."""
    inputs.write_byte_tokenizer(folder, "<s> $A")
    inputs.write_json(folder, config=inputs.OWL, preprocessor_config=inputs.OWL_PICTURES)
    text, vision = inputs.OWL, inputs.OWL["visual_config"]["visual_model"]
    drawn = inputs.OWL["visual_config"]["visual_abstractor"]
    width, inner = text["hidden_size"], text["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (text["vocab_size"], width), "lm_head.weight": (text["vocab_size"], width)}
    shapes |= {"model.norm.weight": (width,)}
    for n in range(text["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        twofold = {"self_attn.k_proj": (width, width), "self_attn.v_proj": (width, width)}
        twofold |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        shapes |= {f"{layer}.{name}.multiway.{way}.weight": s for name, s in twofold.items() for way in (0, 1)}
        single = {"self_attn.q_proj": (width, width), "self_attn.o_proj": (width, width)}
        single |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in single.items()}
    side, deep, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    places = (vision["image_size"] // patch) ** 2 + 1
    seen = "model.vision_model"
    shapes |= {f"{seen}.embeddings.cls_token": (1, 1, side), f"{seen}.embeddings.position_embedding": (1, places, side)}
    shapes |= {f"{seen}.embeddings.patch_embed.weight": (side, 3, patch, patch)}
    shapes |= norm(f"{seen}.embeddings.pre_layernorm", side) | norm(f"{seen}.post_layernorm", side)
    for n in range(vision["num_hidden_layers"]):
        layer = f"{seen}.encoder.layers.{n}"
        shapes |= linear(f"{layer}.self_attn.query_key_value", side, 3 * side)
        shapes |= linear(f"{layer}.self_attn.dense", side, side)
        shapes |= linear(f"{layer}.mlp.fc1", side, deep) | linear(f"{layer}.mlp.fc2", deep, side)
        shapes |= norm(f"{layer}.input_layernorm", side) | norm(f"{layer}.post_attention_layernorm", side)
    top, queries, middle = "model.visual_abstractor", drawn["num_learnable_queries"], drawn["intermediate_size"]
    shapes |= {f"{top}.query_embeds": (1, queries, side), f"{top}.vit_eos": (1, 1, width)}
    shapes |= linear(f"{top}.visual_fc", side, width)
    for n in range(drawn["num_hidden_layers"]):
        layer = f"{top}.encoder.layers.{n}.crossattention"
        for name in ("query", "key", "value"):
            shapes |= linear(f"{layer}.attention.{name}", side, side)
        shapes |= {f"{layer}.attention.q_pos_embed": (queries, side), f"{layer}.attention.k_pos_embed": (places, side)}
        shapes |= linear(f"{layer}.output.out_proj", side, side) | norm(f"{layer}.output.norm2", side)
        for name, pair in (("w1", (side, middle)), ("w3", (side, middle)), ("w2", (middle, side))):
            shapes |= linear(f"{layer}.output.mlp.{name}", *pair)
        shapes |= norm(f"{layer}.output.mlp.ffn_ln", middle)
        shapes |= norm(f"{layer}.norm1", side) | norm(f"{layer}.normk", side)
    save_file(fill({name: torch.empty(shape) for name, shape in shapes.items()}), folder / "model.safetensors")
    return str(folder)


def deqa(folder):
    return DeQA(model=owl_folder(folder / "owl"), batch_size=2, device="cpu", dtype="float32")


def q_align(folder):
    model = owl_folder(folder / "owl")
    return QAlign(model=model, aspect="aesthetics", batch_size=2, device="cpu", dtype="float32")


def checkpoint_shapes():
    """Empty tensors of the names and shapes in the authors' checkpoint, for the sizes of the inputs."""
    vit, bert = inputs.VIT, inputs.BERT
    width, hidden = vit["embed_dim"], bert["hidden_size"]
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, (vit["img_size"] // vit["patch_size"]) ** 2 + 1, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, vit["patch_size"], vit["patch_size"])}
    shapes |= {"patch_embed.proj.bias": (width,)} | norm("norm", width)
    for n in range(vit["depth"]):
        block = f"blocks.{n}"
        shapes |= norm(f"{block}.norm1", width) | norm(f"{block}.norm2", width)
        shapes |= linear(f"{block}.attn.qkv", width, 3 * width) | linear(f"{block}.attn.proj", width, width)
        shapes |= linear(f"{block}.mlp.fc1", width, 4 * width) | linear(f"{block}.mlp.fc2", 4 * width, width)
    named = {f"blip.visual_encoder.{name}": shape for name, shape in shapes.items()}
    shapes = {"embeddings.word_embeddings.weight": (bert["vocab_size"], hidden)}
    shapes |= {"embeddings.position_embeddings.weight": (bert["max_position_embeddings"], hidden)}
    shapes |= norm("embeddings.LayerNorm", hidden)
    for n in range(bert["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        for part, seen in (("attention", hidden), ("crossattention", width)):
            shapes |= linear(f"{layer}.{part}.self.query", hidden, hidden)
            shapes |= linear(f"{layer}.{part}.self.key", seen, hidden)
            shapes |= linear(f"{layer}.{part}.self.value", seen, hidden)
            shapes |= linear(f"{layer}.{part}.output.dense", hidden, hidden)
            shapes |= norm(f"{layer}.{part}.output.LayerNorm", hidden)
        shapes |= linear(f"{layer}.intermediate.dense", hidden, bert["intermediate_size"])
        shapes |= linear(f"{layer}.output.dense", bert["intermediate_size"], hidden)
        shapes |= norm(f"{layer}.output.LayerNorm", hidden)
    named |= {f"blip.text_encoder.{name}": shape for name, shape in shapes.items()}
    named |= linear("blip.vision_proj", width, 256) | linear("blip.text_proj", hidden, 256)  # not used
    sizes = (hidden, 1024, 128, 64, 16, 1)
    for number, (inside, outside) in zip((0, 2, 4, 6, 7), zip(sizes, sizes[1:])):
        named |= linear(f"mlp.layers.{number}", inside, outside)
    return {name: torch.empty(shape) for name, shape in named.items()}


def linear(name, inside, outside):
    return {f"{name}.weight": (outside, inside), f"{name}.bias": (outside,)}


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


REWARDS = {
    "pick_score": pick_score,
    "hpsv2": hpsv2,
    "aesthetic": aesthetic,
    "image_reward": image_reward,
    "hpsv3": hpsv3,
    "hpsv3_plus": hpsv3_plus,
    "edit_reward": edit_reward,
    "aesthetic_v25": aesthetic_v25,
    "clip_t5": clip_t5,
    "deqa": deqa,
    "q_align": q_align,
}


def own_size(reward):
    """Height and width that the model takes without a resize."""
    return (448, 448) if isinstance(reward, QwenReward) else reward.preprocess.size


@pytest.fixture(scope="module", params=REWARDS)
def reward(request, tmp_path_factory):
    return REWARDS[request.param](tmp_path_factory.mktemp(request.param))


def test_gives_the_scores_of_the_original_and_every_output_of_its_heads(reward):
    scores = score(reward, inputs.pictures(), inputs.PROMPTS, METADATA)
    for name, values in {
        reward.name: scores.value,
        **{f"{reward.name}/{n}": v for n, v in scores.parts.items()},
    }.items():
        recorded = torch.tensor(RECORDED[name])
        # of probabilities, which may be small, to 1e-4 of them
        torch.testing.assert_close(values, recorded, atol=CLOSE * min(1, recorded.abs().max().item()), rtol=0)


def test_hpsv3_plus_is_told_how_far_training_is(tmp_path):
    reward = hpsv3_plus(tmp_path, iteration=(0.3, 1.0))
    assert spec_of(reward).scheduled
    reward.advance(0.5)
    values = score(reward, inputs.pictures()[:2], inputs.PROMPTS[:2], METADATA[:2]).value
    torch.testing.assert_close(values, torch.tensor(RECORDED["hpsv3_plus/later"][:2]), atol=1e-4, rtol=0)


def test_the_authors_wording_is_read_from_their_file(tmp_path):
    theirs = tmp_path / "data_collator_qwen.py"
    theirs.write_text(
        'import nothing\nINSTRUCTION = """Judge {text_prompt}."""\nprompt_with_special_token = " So: <|Reward|>"\n'
    )
    assert wording("x", [theirs], CONSTANTS, "it", ["<|Reward|>"]) == "Judge {prompt}. So: <|Reward|>"
    for name, text in (("other.py", "x = 1\n"), ("plain.txt", "{prompt}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="hpsv3: .*" + name):
            HPSv3(str(tmp_path / name))


def test_so_are_those_that_stand_in_several_files_or_within_code(tmp_path):
    (tmp_path / "prompts.py").write_text(
        'INSTRUCTION_EDIT_FOLLOWING = "Done? {text_prompt}"\nINSTRUCTION_EDIT_QUALITY = "Good? {text_prompt}"\n'
    )
    (tmp_path / "data_collator_qwen_edit.py").write_text('prompt_with_special_token = " <|Reward|>"\n')
    asked = read_questions(tmp_path)
    assert asked == {"following": "Done? {prompt} <|Reward|>", "quality": "Good? {prompt} <|Reward|>"}
    (tmp_path / "models" / "vqascore_models").mkdir(parents=True)
    with pytest.raises(ValueError, match="clip_t5: .* is not the authors' t2v_metrics"):
        clip_t5_question(tmp_path)
    (tmp_path / "constants.py").write_text('SYSTEM_MSG = "Be polite."\n')
    (tmp_path / "models" / "vqascore_models" / "clip_t5_model.py").write_text(
        'default_question_template = "Is it {}?"\n'
    )
    assert clip_t5_question(tmp_path) == "Be polite. USER: <image>\nIs it {prompt}? ASSISTANT: "
    (tmp_path / "scorer.py").write_text(
        "class A:\n    def f(self):\n        prompt = 'How is the quality of this image? <|image|>'\n"
        "class B:\n    def f(self):\n        prompt = 'How are the aesthetics of this image? <|image|>'\n"
    )
    assert rating_question("q_align", tmp_path / "scorer.py", "aesthetics").startswith("How are")
    with pytest.raises(ValueError, match="deqa: .*prompts.py must hold"):
        rating_question("deqa", tmp_path / "prompts.py", "quality")


def test_hpsv3_refuses_other_weights(tmp_path):
    hpsv3(tmp_path)
    tensors = load_file(tmp_path / "HPSv3.safetensors")
    del tensors["visual.blocks.0.norm1.weight"]
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors differ, e\.g\. visual\.blocks\.0\.norm1\.weight"):
        HPSv3(weights=str(tmp_path / "other.safetensors"), base=str(tmp_path / "qwen"), device="cpu")


def test_neither_order_nor_batch_size_change_a_score(reward):
    pictures, prompts = inputs.pictures()[:3], inputs.PROMPTS[:3]
    values = score(reward, pictures, prompts, METADATA[:3]).value
    backwards = score(reward, pictures[::-1], prompts[::-1], METADATA[2::-1]).value.flip(0)
    alone = score(reward, pictures[:1], prompts[:1], METADATA[:1]).value
    scale = values.abs().max().clamp(min=1)
    torch.testing.assert_close(backwards / scale, values / scale, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone / scale, values[:1] / scale, atol=1e-5, rtol=0)


def test_gradient_reaches_the_pixels_and_raises_the_score(reward):
    assert isinstance(reward, DifferentiableReward) and spec_of(reward).differentiable
    size = own_size(reward)
    torch.manual_seed(1)
    pixels = (0.5 + 0.1 * torch.randn(2, 3, *size)).clamp(0, 1).requires_grad_()
    prompts = inputs.PROMPTS[:2]
    before = reward.score_pixels(pixels, prompts, METADATA[:2]).value
    (gradient,) = torch.autograd.grad(before.sum(), pixels)
    assert gradient.flatten(1).norm(dim=1).min() > 0
    step = 1e-2 * gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
    after = reward.score_pixels((pixels + step).detach(), prompts, METADATA[:2]).value
    expected = (gradient * step).flatten(1).sum(dim=1)  # first order of Taylor
    torch.testing.assert_close(after - before, expected, rtol=0.05, atol=1e-6)


def test_pixels_score_as_pictures_at_the_models_size(reward):
    picture = inputs.pictures()[3].crop((0, 0, *own_size(reward)[::-1]))
    pixels = torch.tensor(list(picture.tobytes()), dtype=torch.float32).view(1, *picture.size[::-1], 3) / 255
    ours = score(reward, [picture], ["two cats"], METADATA[:1]).value
    torch.testing.assert_close(
        reward.score_pixels(pixels.permute(0, 3, 1, 2), ["two cats"], METADATA[:1]).value, ours, atol=1e-5, rtol=1e-5
    )


def test_pixels_are_worth_their_picture(reward):
    torch.manual_seed(2)
    pixels = (0.5 + 0.1 * torch.randn(1, 3, *own_size(reward))).clamp(0, 1)
    check_pixels(reward, pixels, ["two cats"], METADATA[:1])


def test_a_checkpoint_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights at 'nowhere"):
        ImageReward("nowhere.pt", str(tmp_path))
