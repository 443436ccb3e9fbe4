"""Make a tiny unified model, an `Emu3ForConditionalGeneration` that writes and draws, from nothing.

    python scripts/build_tiny_emu3.py --out runs/tiny_emu3        # about a quarter of an hour of one CPU core

Its pictures are those of `rewards.shapes`: 32x32 pixels as 8x8 tokens. The codebook is k-means of the pictures' squares
of 4x4 pixels, each code their principal components; Emu3's encoder learns the codes, and its decoder the pictures. Then
the language model learns two kinds of texts. One draws at once: a prompt and its picture. The other plans in words:

    two red circles plan red circle r2 c1 red circle r5 c6 <|image start|> ...

where r and c are the row and the column of each shape's middle among the 8x8 tokens. Where a picture stands within its
text is as Emu3 has it: the size, a token before it, a token at the end of each line, and three at its end. A tenth of
the pictures follows no prompt, for guidance. `quality.json` has what was measured; runs/ is not shipped.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.cluster.vq import kmeans2
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import Emu3Config, Emu3ForConditionalGeneration, PreTrainedTokenizerFast

from rewards.shapes import check, draw, sample_requests, train_requests
from rewards.shapes.checker import find_objects
from rewards.shapes.draw import PALETTE
from rewards.shapes.grammar import all_requests

SIDE, PIXELS, CODES, COMPONENTS = 8, 4, 192, 8
SPECIAL = ["<pad>", "<s>", "</s>", "<|image start|>", "<|image end|>", "<|image token|>", "<|extra_200|>"]
SPECIAL += ["<|extra_201|>", "<image>"]
WEIGHTS = {"single": 0.2, "counting": 0.4, "two_objects": 0.4}  # of "position" it knows nothing
BATCH = 64


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, and Emu3's names of the others."""
    words = dict.fromkeys(word for request in all_requests() for word in request.prompt.split())
    words |= dict.fromkeys([*PALETTE, "circle", "square", "triangle", "plan", "8", "*"])
    words |= dict.fromkeys(f"{axis}{i}" for axis in "rc" for i in range(SIDE))
    visual = [f"<|visual token {i:06d}|>" for i in range(CODES)]
    made = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *words, *visual])}, unk_token="<pad>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([*SPECIAL, *visual])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<|image start|>",
            "eoi_token": "<|image end|>",
            "image_wrapper_token": "<|image token|>",
            "eol_token": "<|extra_200|>",
            "eof_token": "<|extra_201|>",
        },
        padding_side="left",
    )


def network(tokens: PreTrainedTokenizerFast) -> Emu3ForConditionalGeneration:
    """About a million and a half random weights."""
    text = {
        "vocab_size": len(tokens),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vq = {
        "codebook_size": CODES,
        "embed_dim": COMPONENTS,
        "latent_channels": COMPONENTS,
        "temporal_downsample_factor": 1,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "hidden_size": 32,
    }
    return Emu3ForConditionalGeneration(Emu3Config(vq_config=vq, text_config=text, vocabulary_map=tokens.get_vocab()))


def squares(pictures: Tensor) -> Tensor:
    """[B, 3, 32, 32] -> [B, 64, 48]"""
    return torch.nn.functional.unfold(pictures, PIXELS, stride=PIXELS).transpose(1, 2)


def codebook(vectors: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Middles [K, 48] of the squares [N, 48], and their principal components [K, C], of unit variance; labels are left
    to `codes`."""
    middle, _ = kmeans2(vectors.numpy(), CODES, minit="points", rng=np.random.default_rng(seed))
    centres = torch.from_numpy(middle)
    centred = centres - centres.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    components = centred @ directions[:COMPONENTS].T
    return centres, components / components.std(0), directions


def codes(pictures: Tensor, centres: Tensor) -> Tensor:
    """[B, 8, 8] the nearest middle of each square."""
    return torch.cdist(squares(pictures), centres).argmin(-1).view(-1, SIDE, SIDE)


def teach_pictures(vq: torch.nn.Module, pictures: Tensor, labels: Tensor, steps: int) -> None:
    """The encoder learns the codes' embeddings, the decoder the pictures."""
    vq.quantize.embedding.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in vq.parameters() if p.requires_grad], 2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(1, steps + 1):
        rows = torch.randint(len(pictures), (16,))
        target = vq.quantize.embedding(labels[rows])
        hidden = vq.quant_conv(vq.encoder(pictures[rows, None]).transpose(1, 2))[:, :, 0]
        read = mse_loss(hidden.permute(0, 2, 3, 1), target)
        drawn = mse_loss(vq.decode(labels[rows]), pictures[rows])
        (read + 10 * drawn).backward()
        torch.nn.utils.clip_grad_norm_(vq.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"pictures, step {step}: encoder {read.item():.3f}, decoder {drawn.item():.4f}", flush=True)


def image(pixels: Tensor) -> Image.Image:
    return Image.fromarray(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def plan_of(picture: Image.Image) -> str:
    """Its shapes in words, from the top to the bottom."""
    found = sorted(find_objects(picture), key=lambda shape: (int(shape.y) // PIXELS, shape.x))
    return " ".join(f"{s.colour} {s.shape} r{int(s.y) // PIXELS} c{int(s.x) // PIXELS}" for s in found)


def lines_of(labels: Tensor, tokens: PreTrainedTokenizerFast) -> list[int]:
    """Token ids of a picture's text, from its size to the end."""
    first = tokens.convert_tokens_to_ids("<|visual token 000000|>")
    rows = [[*(first + row).tolist(), tokens.eol_token_id] for row in labels]
    size = tokens(f"{SIDE}*{SIDE}", add_special_tokens=False).input_ids
    end = [tokens.eof_token_id, tokens.eoi_token_id, tokens.eos_token_id]
    return [tokens.boi_token_id, *size, tokens.image_wrapper_token_id, *(token for row in rows for token in row), *end]


def teach_texts(model: torch.nn.Module, texts: list[list[int]], starts: list[int], steps: int, minutes: float) -> int:
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    places = torch.arange(width)
    learned = (ids != 0) & (places >= torch.tensor(starts)[:, None])
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, 2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    begin = time.time()
    for step in range(1, steps + 1):
        rows = torch.randint(len(ids), (BATCH,))
        logits = model(input_ids=ids[rows], attention_mask=(ids[rows] != 0).long()).logits[:, :-1]
        keep = learned[rows, 1:]
        loss = cross_entropy(logits[keep], ids[rows, 1:][keep])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"texts, step {step}: loss {loss.item():.3f}, {time.time() - begin:.0f} s", flush=True)
        if time.time() - begin > 60 * minutes:
            break
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--pictures", type=int, default=12000, help="pictures to learn from")
    parser.add_argument("--picture-steps", type=int, default=500)
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=60.0, help="most minutes of the language model's training")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    requests = sample_requests(train_requests(), arguments.pictures, rng, WEIGHTS)
    drawn = [draw(request, rng) for request in requests]
    pictures = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 127.5 - 1
    tokens = tokenizer()
    model = network(tokens)
    vq = model.model.vqmodel
    vectors = squares(pictures[:2000]).flatten(0, 1)
    ink = vectors.std(1) > 0.02
    centres, components, _ = codebook(torch.cat([vectors[ink], vectors[~ink][:500]]), 0)
    vq.quantize.embedding.weight.data.copy_(components)
    labels = torch.cat([codes(some, centres) for some in pictures.split(500)])
    teach_pictures(vq, pictures, labels, arguments.picture_steps)
    some = slice(0, 200)
    with torch.no_grad():
        again = vq.decode(labels[some])
        read = vq.encode(pictures[some], torch.tensor([[32, 32]] * 200)).image_tokens
    right = [check(image(p), r.prompt).strict for p, r in zip(again, requests[some], strict=True)]
    quality = {
        "pictures_from_codes_read_right": sum(right) / len(right),
        "codes_of_the_encoder": (torch.stack(read) == labels[some]).float().mean().item(),
    }
    print(quality, flush=True)
    texts, starts = [], []
    for number, request in enumerate(requests):
        prompt = "" if rng.random() < 0.1 else request.prompt
        planned = prompt and number % 2
        text = f"{prompt} plan" if planned else prompt
        words = [tokens.bos_token_id, *tokens(text, add_special_tokens=False).input_ids]
        starts.append(len(words))
        if planned:
            words += tokens(plan_of(Image.fromarray(drawn[number])), add_special_tokens=False).input_ids
        texts.append(words + lines_of(labels[number], tokens))
    vq.requires_grad_(False)
    quality["text_steps"] = teach_texts(model, texts, starts, arguments.text_steps, arguments.minutes)
    quality["parameters"] = model.num_parameters()
    model.half().save_pretrained(arguments.out)
    tokens.save_pretrained(arguments.out)
    (arguments.out / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")


if __name__ == "__main__":
    main()
