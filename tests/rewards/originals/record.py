"""Record what the authors' own code makes of the inputs beside this file; README.md says how to run it."""

import ast
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from inputs import (  # noqa: E402
    AESTHETIC,
    BERT,
    BERT_VOCABULARY,
    HPS,
    PROMPTS,
    VIT,
    pictures,
    weights,
    write_clip_folder,
    write_qwen_folder,
)


def fill(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give a model the inputs' weights; returns its state."""
    state = model.state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items() if t.is_floating_point()}
    state |= {name: torch.from_numpy(array) for name, array in weights(shapes).items()}
    model.load_state_dict(state)
    model.eval()
    return state


def image_reward(folder: Path, source: Path) -> list[float]:
    # The package's __init__ wants its training dependencies, so it is left out.
    for name in ("ImageReward", "ImageReward.models"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source / name.replace(".", "/"))]
    import ImageReward.models.BLIP.blip_pretrain as pretrain
    from ImageReward.ImageReward import ImageReward
    from ImageReward.models.BLIP.vit import VisionTransformer

    # Smaller networks; the authors take these sizes from their code and a file of the hub.
    pretrain.create_vit = lambda *_: (VisionTransformer(**VIT, drop_path_rate=0.1), VIT["embed_dim"])
    os.chdir(folder)
    (folder / "bert-base-uncased").mkdir()
    (folder / "bert-base-uncased" / "vocab.txt").write_text("\n".join(BERT_VOCABULARY))
    (folder / "med_config.json").write_text(json.dumps(BERT))
    model = ImageReward("med_config.json")
    fill(model)
    return [model.score(prompt, image) for prompt, image in zip(PROMPTS, pictures())]


def hpsv2(folder: Path) -> list[float]:
    import hpsv2.img_score as original
    from hpsv2.src.open_clip import add_model_config, create_model_and_transforms

    (folder / "tiny.json").write_text(json.dumps(HPS))
    add_model_config(folder / "tiny.json")
    # As initialize_model() there, but for the architecture.
    options = {"precision": "amp", "device": "cpu", "light_augmentation": True, "output_dict": True, "aug_cfg": {}}
    model, _, preprocess = create_model_and_transforms("tiny", None, **options)
    torch.save({"state_dict": fill(model)}, folder / "hps.pt")
    original.model_dict = {"model": model, "preprocess_val": preprocess}
    return [float(original.score(i, p, cp=folder / "hps.pt")[0]) for p, i in zip(PROMPTS, pictures())]


def aesthetic(source: Path) -> list[float]:
    import clip.clip
    import clip.model

    # The script runs at import and asks for a GPU, so its two definitions are taken out of it.
    tree = ast.parse((source / "simple_inference.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in ("MLP", "normalized")]
    names = {"nn": nn, "pl": type("lightning", (), {"LightningModule": nn.Module})}
    exec(compile(tree, "simple_inference.py", "exec"), names)
    vision, text = AESTHETIC["vision_cfg"], AESTHETIC["text_cfg"]
    tower = clip.model.CLIP(
        AESTHETIC["embed_dim"],
        vision["image_size"],
        vision["layers"],
        vision["width"],
        vision["patch_size"],
        text["context_length"],
        text["vocab_size"],
        text["width"],
        text["heads"],
        text["layers"],
    )
    head = names["MLP"](AESTHETIC["embed_dim"])
    fill(tower)
    fill(head)
    preprocess = clip.clip._transform(vision["image_size"])
    scores = []
    for image in pictures():
        with torch.no_grad():
            features = tower.encode_image(preprocess(image).unsqueeze(0))
            unit = names["normalized"](features.numpy())
            scores.append(head(torch.from_numpy(unit).float()).item())
    return scores


def pick_score(folder: Path) -> list[float]:
    """The code of the README of PickScore, in the version of transformers of its time."""
    from transformers import AutoModel, AutoProcessor, CLIPConfig, CLIPModel

    write_clip_folder(folder)
    model = CLIPModel(CLIPConfig.from_pretrained(folder))
    fill(model)
    model.save_pretrained(folder)
    processor, model = AutoProcessor.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    scores = []
    for prompt, image in zip(PROMPTS, pictures()):
        options = {"padding": True, "truncation": True, "max_length": 77, "return_tensors": "pt"}
        image_inputs, text_inputs = processor(images=[image], **options), processor(text=prompt, **options)
        with torch.no_grad():
            image_embs = model.get_image_features(**image_inputs)
            image_embs = image_embs / torch.norm(image_embs, dim=-1, keepdim=True)
            text_embs = model.get_text_features(**text_inputs)
            text_embs = text_embs / torch.norm(text_embs, dim=-1, keepdim=True)
            scores.append((model.logit_scale.exp() * (text_embs @ image_embs.T)[0]).item())
    return scores


def hpsv3(folder: Path, source: Path) -> dict[str, list[float]]:
    """As HPSv3RewardInferencer does, with our instruction in the place of theirs: both outputs of the head."""
    from qwen_vl_utils import process_vision_info
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    # Its file wants the training's dependencies, so the class is taken out of it.
    tree = ast.parse((source / "hpsv3" / "model" / "qwen2vl_trainer.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) == "Qwen2VLRewardModelBT"]
    names = {"torch": torch, "nn": nn, "List": list, "Optional": Optional}
    names["Qwen2VLForConditionalGeneration"] = Qwen2VLForConditionalGeneration
    exec(compile(tree, "qwen2vl_trainer.py", "exec"), names)
    write_qwen_folder(folder)
    processor = AutoProcessor.from_pretrained(folder, padding_side="right")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    special = processor.tokenizer.convert_tokens_to_ids(["<|Reward|>"])
    config = Qwen2VLForConditionalGeneration.config_class.from_pretrained(folder)
    model = names["Qwen2VLRewardModelBT"](config, 2, "special", special, "ranknet")
    model.resize_token_embeddings(len(processor.tokenizer))
    fill(model)
    model.config.pad_token_id = processor.tokenizer.pad_token_id
    instruction = (HERE.parents[2] / "rewards" / "wordings" / "hpsv3.txt").read_text()
    messages = []
    for prompt, image in zip(PROMPTS, pictures()):
        picture = {"type": "image", "image": image, "min_pixels": 256 * 28 * 28, "max_pixels": 256 * 28 * 28}
        text = {"type": "text", "text": instruction.format(prompt=prompt)}
        messages.append([{"role": "user", "content": [picture, text]}])
    batch = processor(
        text=processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        images=process_vision_info(messages)[0],
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        mean, spread = model(return_dict=True, **batch)["logits"].T.tolist()
    return {"hpsv3": mean, "hpsv3/spread": spread}


def main() -> None:
    sources = Path(sys.argv[1]).resolve()
    if sys.argv[2:] == ["hpsv3"]:
        with tempfile.TemporaryDirectory() as name:
            keep(hpsv3(Path(name), sources / "HPSv3"))
        return
    sys.path[:0] = [str(sources / name) for name in ("HPSv2", "CLIP")]
    scores = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scores["pick_score"] = pick_score(folder / "pick")
        scores["hpsv2"] = hpsv2(folder)
        scores["aesthetic"] = aesthetic(sources / "improved-aesthetic-predictor")
        scores["image_reward"] = image_reward(folder, sources / "ImageReward")
        os.chdir(HERE)
    keep(scores)


def keep(scores: dict[str, list]) -> None:
    """Put these scores into the file, beside those of other rewards."""
    file = HERE / "scores.json"
    for name, values in scores.items():
        print(name, np.round(values, 5).tolist())
    file.write_text(json.dumps(json.loads(file.read_text()) | scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
