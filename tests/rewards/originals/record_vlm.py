"""As record.py, for rewards on larger models; README.md says how to run it."""

import ast
import contextlib
import sys
import tempfile
import types
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from PIL import Image
from record import HERE, fill, keep
from torch import nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

sys.path.insert(0, str(HERE))
from inputs import (
    BIND,
    DINA,
    OWL,
    OWL_PICTURES,
    PICTURES,
    PROMPTS,
    QWEN3,
    QWEN3_PICTURES,
    QWEN25,
    SD3,
    SIGLIP,
    SIGLIP_PICTURES,
    T5,
    VIDEO,
    VIDEO_FPS,
    latents,
    pictures,
    spectrograms,
    videos,
    write_byte_tokenizer,
    write_clip_folder,
    write_json,
    write_qwen_folder,
)

WORDINGS = HERE.parents[2] / "rewards" / "wordings"


def taken(file: Path, *classes: str, **names) -> dict:
    """Classes and functions out of a file that wants the training's dependencies."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in classes]
    names |= {"torch": torch, "nn": nn, "List": list, "Optional": Optional}
    exec(compile(tree, file.name, "exec"), names)
    return names


def ready(model: nn.Module, processor) -> nn.Module:
    """As the authors' create_model_and_processor leaves a model, with the inputs' weights."""
    model.resize_token_embeddings(len(processor.tokenizer))
    fill(model)
    model.config.pad_token_id = processor.tokenizer.pad_token_id
    return model


def with_tokens(folder: Path, tokens: list[str]):
    """The processor as the authors make it, and the ids of its new tokens."""
    processor = AutoProcessor.from_pretrained(folder, padding_side="right")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return processor, processor.tokenizer.convert_tokens_to_ids(tokens)


def video_reward(folder: Path, source: Path) -> dict[str, list[float]]:
    """As VideoVLMRewardInference.reward, with our instruction in the place of theirs; transformers 4.45.2."""
    from transformers import Qwen2VLForConditionalGeneration

    sys.path.insert(0, str(source))
    import vision_process

    kind = taken(
        source / "trainer.py",
        "Qwen2VLRewardModelBT",
        Qwen2VLForConditionalGeneration=Qwen2VLForConditionalGeneration,
    )["Qwen2VLRewardModelBT"]
    write_qwen_folder(folder)
    processor, special = with_tokens(folder, ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"])
    instruction = (WORDINGS / "video_reward.txt").read_text()
    films = {f"{i}.mp4": np.stack([np.asarray(frame) for frame in film]) for i, film in enumerate(videos())}

    def read_video(path, **_):
        film = torch.from_numpy(films[Path(path).name]).permute(0, 3, 1, 2)
        return film, None, {"video_fps": VIDEO_FPS}

    vision_process.io = types.SimpleNamespace(read_video=read_video)
    vision_process.get_video_reader_backend = lambda: "torchvision"
    data, scores = VIDEO["data_config"], {}
    for outputs in (1, 3):
        config = AutoConfig.from_pretrained(folder)
        model = ready(kind(config, outputs, "special", special), processor)
        chats = []
        for name, prompt in zip(films, PROMPTS):
            video = {"type": "video", "video": f"file:///{name}", "max_pixels": data["max_frame_pixels"]}
            video |= {"fps": data["fps"], "sample_type": data["sample_type"]}
            text = {"type": "text", "text": instruction.format(prompt=prompt)}
            chats.append([{"role": "user", "content": [video, text]}])
        batch = processor(
            text=processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True),
            images=None,
            videos=vision_process.process_vision_info(chats)[1],
            padding=True,
            return_tensors="pt",
            videos_kwargs={"do_rescale": True},
        )
        with torch.no_grad():
            made = model(return_dict=True, **batch)["logits"]
        known = VIDEO["inference_config"]
        normal = [(made[:, i] - known[f"{r}_mean"]) / known[f"{r}_std"] for i, r in enumerate(("VQ", "MQ", "TA"))]
        ours = ("visual", "motion", "alignment")
        scores |= {f"video_reward/{outputs}/{name}": own.tolist() for name, own in zip(ours, normal)}
    return scores


@contextlib.contextmanager
def as_package(source: Path, *names: str):
    """Packages of the authors without their __init__, which wants the training's dependencies."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source / name.replace(".", "/"))]
    yield


def edit_reward(folder: Path, source: Path) -> dict[str, list[float]]:
    """As EditRewardInferencer.reward with two heads and their mean, our instructions; transformers 4.57.0."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    with as_package(source, "EditReward", "EditReward.dataset"):
        from EditReward.dataset.utils import process_vision_info
    kind = taken(
        source / "EditReward" / "model" / "qwen2_5_vl_trainer.py",
        "Qwen2_5_VLRewardModelBT_MultiHead",
        Qwen2_5_VLForConditionalGeneration=Qwen2_5_VLForConditionalGeneration,
    )["Qwen2_5_VLRewardModelBT_MultiHead"]
    write_qwen_folder(folder, QWEN25, processor="Qwen2_5_VLProcessor")
    processor, special = with_tokens(folder, ["<|Reward|>"])
    config = AutoConfig.from_pretrained(folder)
    model = ready(kind(config, 2, "special", special, "ranknet_multi_head", pooling_strategy=None), processor)
    size = {"min_pixels": 256 * 28 * 28, "max_pixels": 256 * 28 * 28}
    batches = {}
    for i, name in enumerate(("following", "quality")):
        instruction = (WORDINGS / "edit_reward" / f"{name}.txt").read_text()
        chats = []
        for prompt, source_image, image in zip(PROMPTS, pictures()[::-1], pictures()):
            shown = [{"type": "image", "image": own} | size for own in (source_image, image)]
            text = {"type": "text", "text": instruction.format(prompt=prompt)}
            chats.append([{"role": "user", "content": [*shown, text]}])
        batches[f"batch_dim{i + 1}"] = processor(
            text=processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True),
            images=process_vision_info(chats)[0],
            padding=True,
            return_tensors="pt",
            videos_kwargs={"do_rescale": True},
        )
    with torch.no_grad():
        following, quality = model(return_dict=True, **batches)
        model.pooling_strategy = "mean"
        mean, spread = model(return_dict=True, **batches)["logits"].T.tolist()
    return {
        "edit_reward": mean,
        "edit_reward/following": following[:, 0].tolist(),
        "edit_reward/quality": quality[:, 0].tolist(),
        "edit_reward/spread": spread,
    }


def hpsv3_plus(folder: Path, source: Path) -> dict[str, list[float]]:
    """As HPSv3RewardInferencer.reward on one picture after the other, our instruction; transformers 4.57.0."""
    with as_package(source, "hpsv3", "hpsv3.dataset", "hpsv3.model"):
        from hpsv3.dataset.utils import process_vision_info
        from hpsv3.model.qwen3vl_rm import Qwen3VLRewardModelFiLMHybrid
    write_qwen_folder(folder, QWEN3, QWEN3_PICTURES, "Qwen3VLProcessor")
    processor, special = with_tokens(folder, ["<|Reward|>"])
    config = AutoConfig.from_pretrained(folder)
    model = ready(Qwen3VLRewardModelFiLMHybrid(config, 2, "special", special, "ranknet", cond_dim=32), processor)
    instruction = (WORDINGS / "hpsv3.txt").read_text()
    rows = []
    for number, (prompt, image) in enumerate(zip(PROMPTS, pictures())):
        picture = {"type": "image", "image": image, "min_pixels": 256 * 28 * 28, "max_pixels": 256 * 28 * 28}
        chat = [{"role": "user", "content": [picture, {"type": "text", "text": instruction.format(prompt=prompt)}]}]
        batch = processor(
            text=processor.apply_chat_template([chat], tokenize=False, add_generation_prompt=True),
            images=process_vision_info([chat])[0],
            padding=True,
            return_tensors="pt",
            videos_kwargs={"do_rescale": True},
        )
        for iteration in (0.0, 0.65):
            with torch.no_grad():
                made = model(return_dict=True, iter_values=torch.tensor([iteration]), **batch)
            rows.append((number, iteration, *made["logits"][0].tolist(), made["cond_pred"][0, 0].item()))
    early = [row for row in rows if row[1] == 0.0]
    return {
        "hpsv3_plus": [row[2] for row in early],
        "hpsv3_plus/spread": [row[3] for row in early],
        "hpsv3_plus/ability": [row[4] for row in early],
        "hpsv3_plus/later": [row[2] for row in rows if row[1] > 0],
    }


def aesthetic_v25(folder: Path, source: Path) -> dict[str, list[float]]:
    """As the README of the predictor does; transformers 4.45.2."""
    sys.path.insert(0, str(source / "src"))
    from aesthetic_predictor_v2_5.siglip_v2_5 import AestheticPredictorV2_5Model, AestheticPredictorV2_5Processor

    write_json(folder, config=SIGLIP, preprocessor_config=SIGLIP_PICTURES)
    config = AutoConfig.from_pretrained(folder)
    model = AestheticPredictorV2_5Model(config.vision_config)
    fill(model)
    processor = AestheticPredictorV2_5Processor.from_pretrained(folder)
    with torch.no_grad():
        made = [model(processor(images=image, return_tensors="pt").pixel_values).logits.item() for image in pictures()]
    return {"aesthetic_v25": made}


def clip_t5(folder: Path, source: Path) -> dict[str, list[float]]:
    """As CLIPT5Model.forward, with our question in the place of theirs; transformers 4.45.2."""
    from transformers import CLIPConfig, CLIPVisionModel

    name = "t2v_metrics.models.vqascore_models"
    with as_package(source, "t2v_metrics", "t2v_metrics.models", name, f"{name}.clip_t5"):
        from t2v_metrics.models.vqascore_models.clip_t5.model import CLIPT5ForConditionalGeneration
        from t2v_metrics.models.vqascore_models.clip_t5.model.language_model.clip_t5 import CLIPT5Config
    helpers = source / "t2v_metrics" / "models" / "vqascore_models"
    expand2square = taken(helpers / "mm_utils.py", "expand2square", Image=Image)["expand2square"]
    helper = "t5_tokenizer_image_token"
    tokenize = taken(helpers / "mm_utils.py", helper, IMAGE_TOKEN_INDEX=-200)[helper]
    write_clip_folder(folder / "clip")
    CLIPVisionModel(CLIPConfig.from_pretrained(folder / "clip").vision_config).save_pretrained(folder / "tower")
    write_json(folder / "tower", preprocessor_config=PICTURES)
    write_byte_tokenizer(folder / "t5", "$A </s>")
    tokenizer = AutoTokenizer.from_pretrained(folder / "t5")
    model = CLIPT5ForConditionalGeneration(CLIPT5Config(**T5, mm_vision_tower=str(folder / "tower")))
    fill(model)
    question = (WORDINGS / "clip_t5.txt").read_text()
    tower = model.get_vision_tower().image_processor
    colour = tuple(int(x * 255) for x in tower.image_mean)
    pixels = torch.stack(
        [tower.preprocess(expand2square(i, colour), return_tensors="pt")["pixel_values"][0] for i in pictures()]
    )
    tokens = [tokenize(question.format(prompt=prompt), tokenizer, return_tensors="pt") for prompt in PROMPTS]
    tokens = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id)
    answer = tokenize("Yes", tokenizer, return_tensors="pt").repeat(len(PROMPTS), 1)
    with torch.no_grad():
        logits = model(
            input_ids=tokens,
            attention_mask=tokens.ne(tokenizer.pad_token_id),
            decoder_attention_mask=answer.ne(-100),
            labels=answer,
            images=pixels,
            return_dict=True,
        ).logits
    loss = torch.nn.CrossEntropyLoss(reduction="mean")
    return {"clip_t5": [(-loss(own, label)).exp().item() for own, label in zip(logits, answer)]}


def deqa(folder: Path, source: Path) -> dict[str, list[float]]:
    """As the Scorers of DeQA-Score and Q-Align, whose networks are the same, with our question; transformers 4.36.2."""
    sys.modules["icecream"] = types.ModuleType("icecream")
    sys.modules["icecream"].ic = print
    with as_package(source, "src", "src.model"):
        from src.model.configuration_mplug_owl2 import MPLUGOwl2Config
        from src.model.modeling_mplug_owl2 import MPLUGOwl2LlamaForCausalLM
    from transformers import CLIPImageProcessor

    scorer = source / "src" / "evaluate" / "scorer.py"
    tokenize = taken(
        source / "src" / "mm_utils.py",
        "tokenizer_image_token",
        torch=torch,
        IMAGE_TOKEN_INDEX=-200,
        DEFAULT_IMAGE_TOKEN="<|image|>",
    )["tokenizer_image_token"]
    kind = taken(scorer, "Scorer", Image=Image, List=list)["Scorer"]
    write_byte_tokenizer(folder / "words", "<s> $A")
    write_json(folder, preprocessor_config=OWL_PICTURES)
    tokenizer = AutoTokenizer.from_pretrained(folder / "words")
    config = MPLUGOwl2Config(**{key: value for key, value in OWL.items() if key != "model_type"})
    config._attn_implementation = "eager"
    model = MPLUGOwl2LlamaForCausalLM(config)
    fill(model)
    processor = CLIPImageProcessor.from_pretrained(folder)
    squared = [kind.expand2square(None, i, tuple(int(x * 255) for x in processor.image_mean)) for i in pictures()]
    pixels = processor.preprocess(squared, return_tensors="pt")["pixel_values"]
    words = [ids[1] for ids in tokenizer(["excellent", "good", "fair", "poor", "bad"])["input_ids"]]
    scores = {}
    for name, aspect, worths in (
        ("deqa", "quality", [5.0, 4.0, 3.0, 2.0, 1.0]),
        ("q_align", "aesthetics", [1.0, 0.75, 0.5, 0.25, 0.0]),
    ):
        question = (WORDINGS / "rated.txt").read_text().rstrip("\n").format(aspect=aspect)
        tokens = tokenize(question, tokenizer, return_tensors="pt")[None].repeat(len(pixels), 1)
        with torch.no_grad():
            logits = model(input_ids=tokens, images=pixels)["logits"][:, -1, words]
        scores[name] = (torch.softmax(logits, -1) @ torch.tensor(worths)).tolist()
    return scores


def dina(folder: Path, source: Path) -> dict[str, list[float]]:
    """SD3RewardModel on a small transformer, at one noise level and at two; the transformers and diffusers of today."""
    from diffusers import SD3Transformer2DModel

    with as_package(source, "diffusion_rm", "diffusion_rm.models"):
        from diffusion_rm.models.sd3_rm import SD3RewardModel

    def spaces(settings):
        return {key: types.SimpleNamespace(**own) if key == "lora_config" else own for key, own in settings.items()}

    pipeline = types.SimpleNamespace(transformer=SD3Transformer2DModel(**SD3))
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        setattr(pipeline, name, nn.Linear(1, 1))
    pipeline.tokenizer = pipeline.tokenizer_2 = pipeline.tokenizer_3 = None
    model = SD3RewardModel(pipeline, types.SimpleNamespace(**spaces(DINA)), "cpu", torch.float32)
    fill(model)
    given = latents()
    first, second = (torch.from_numpy(own) for own in given["latents"])
    embeds, pooled = torch.from_numpy(given["embeds"]), torch.from_numpy(given["pooled"])
    early, late = (torch.full((len(first),), time) for time in given["times"])
    with torch.no_grad():
        one = model(first, embeds, pooled, early)
        two = model.forward_ensemble([first, second], embeds, pooled, [early, late])
    return {"dina/one": one[:, 0].tolist(), "dina/two": two[:, 0].tolist()}


def imagebind(folder: Path, source: Path) -> dict[str, list[float]]:
    """ImageBindModel: what a sound's and a text's embeddings make of each other, without the scales after them."""
    for name in ("einops", "iopath", "iopath.common", "iopath.common.file_io"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["einops"].rearrange = lambda x, rule: x.transpose(0, 1)  # the two rules there are
    sys.modules["iopath.common.file_io"].g_pathmgr = None
    with as_package(source, "imagebind", "imagebind.models"):
        from imagebind.models.imagebind_model import ImageBindModel
    model = ImageBindModel(**BIND)
    fill(model)
    model.modality_preprocessors["text"].mask.copy_(torch.full((77, 77), float("-inf")).triu(1))
    heard, texts = (torch.from_numpy(own) for own in spectrograms())
    with torch.no_grad():
        made = model({"audio": heard, "text": texts})
        scales = [
            model.modality_postprocessors[kind][1].log_logit_scale.exp().clip(max=100) for kind in ("audio", "text")
        ]
    return {"imagebind": ((made["audio"] * made["text"]).sum(-1) / scales[0] / scales[1]).tolist()}


if __name__ == "__main__":
    found = Path(sys.argv[1]).resolve()
    sources = {video_reward: "VideoAlign", edit_reward: "EditReward", hpsv3_plus: "HPSv3-PlusPlus"}
    sources |= {
        aesthetic_v25: "aesthetic-predictor-v2-5",
        clip_t5: "t2v_metrics",
        deqa: "DeQA-Score",
        dina: "diffusion-rm",
        imagebind: "ImageBind",
    }
    for make, name in sources.items():
        if make.__name__ in sys.argv[2:]:
            with tempfile.TemporaryDirectory() as temporary:
                keep(make(Path(temporary), found / name))
