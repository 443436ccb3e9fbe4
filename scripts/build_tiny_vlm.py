"""Make a tiny but real image-text-to-text model that answers questions about the shapes world.

    python scripts/build_tiny_vlm.py --out flowalign/data/assets/tiny_vlm

An InternVL of 0.7 million weights (vision transformer, pixel shuffle, Qwen2) with its own tokenizer, processor and
chat template, trained from nothing on drawn pictures to

    "Does this picture show {prompt}?"             Yes / No
    "Which picture shows {prompt} better, 1 or 2?" 1 / 2      (two pictures)
    "Describe this picture."                       {prompt}

It is measured on the held-out prompts of `rewards.shapes` and written as float16 safetensors with quality.json.
It loads with AutoProcessor and AutoModelForImageTextToText, and reads 32x32 pictures (others are resized).
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)

from rewards.shapes import CATEGORIES, Request, Thing, all_requests, draw, heldout_requests, sample_requests
from rewards.shapes.grammar import COLOURS, OPPOSITES, RELATIONS, SHAPES, train_requests

SIZE, PATCH = 32, 4
IMAGE_TOKENS = (SIZE // PATCH // 2) ** 2  # after the pixel shuffle
WEIGHTS = {"single": 0.1, "counting": 0.25, "two_objects": 0.25, "position": 0.4}
SHOWS = "Does this picture show {}?"
BETTER = "Which picture shows {} better, 1 or 2?"
DESCRIBE = "Describe this picture."
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<img>", "</img>", "<image>", "<video>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HOSTILE = ("blank", "noise", "text")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("flowalign/data/assets/tiny_vlm"), help="folder; replaced whole"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and pictures")
    parser.add_argument("--steps", type=int, default=1100, help="training steps")
    parser.add_argument("--batch", type=int, default=24, help="pictures a step, eight questions each")
    parser.add_argument("--threads", type=int, default=1, help="processor threads; other numbers round differently")
    arguments = parser.parse_args()
    build(**vars(arguments))


def build(out: Path, seed: int, steps: int, batch: int, threads: int) -> None:
    """Train, measure and write `out`."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    processor = new_processor()
    model = new_model(processor)
    begin = time.perf_counter()
    train(model, processor, steps, batch, np.random.default_rng(seed))
    seconds = time.perf_counter() - begin
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new, old = Path(folder, "new"), Path(folder, "old")
        model.half().save_pretrained(new)
        processor.save_pretrained(new)
        quality = measure(new, np.random.default_rng(seed + 1)) | {"training_seconds": round(seconds)}
        quality["made_by"] = f"scripts/build_tiny_vlm.py --seed {seed} --steps {steps} --batch {batch}"
        (new / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")
        if out.exists():
            out.rename(old)
        new.rename(out)
    megabytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    print(json.dumps(quality, indent=2))
    print(f"wrote {out} ({megabytes:.1f} MB)", flush=True)


def new_processor() -> InternVLProcessor:
    """A byte-level BPE tokenizer whose merges come from the grammar and the questions, and a 32x32 processor."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    prompts = [request.prompt for request in all_requests()]
    corpus = [*prompts, *(SHOWS.format(p) for p in prompts), *(BETTER.format(p) for p in prompts)]
    corpus += [DESCRIBE, "Yes", "No", "Score: 1 2 3 4 5 6 7 8 9 10"] * 100
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<image>",
            "video_token": "<video>",
        },
    )
    size = {"height": SIZE, "width": SIZE}
    mean = std = [0.5, 0.5, 0.5]
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, image_mean=mean, image_std=std, min_patches=1, max_patches=1),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size, image_mean=mean, image_std=std),
        image_seq_length=IMAGE_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def new_model(processor: InternVLProcessor) -> InternVLForConditionalGeneration:
    """An untrained InternVL."""
    tokenizer = processor.tokenizer
    config = InternVLConfig(
        vision_config=dict(
            hidden_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=256,
            image_size=[SIZE, SIZE],
            patch_size=[PATCH, PATCH],
            layer_scale_init_value=1.0,
        ),
        text_config=dict(
            model_type="qwen2",
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        image_token_id=processor.image_token_id,
        image_seq_length=IMAGE_TOKENS,
    )
    model = InternVLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def shows(drawn: Request, asked: Request) -> bool | None:
    """Whether a picture drawn for one request shows another; None where the layout would decide."""
    if sorted(map(str, drawn.things)) != sorted(map(str, asked.things)):
        return False
    if asked.relation is None:
        return True
    if drawn.relation is None:
        return None
    return asked in (drawn, drawn.twin)


def near_miss(request: Request, rng: np.random.Generator) -> Request:
    """A request that differs in one respect: a colour, a shape, the number, or the relation."""
    things = list(request.things)
    kind = rng.choice(["colour", "shape", "number" if request.category == "counting" else "relation"])
    if kind == "relation" and request.relation:
        others = [r for r in RELATIONS if r != request.relation]
        # mirrored half of the time, as it is the hardest to tell
        relation = OPPOSITES[request.relation] if rng.random() < 0.5 else str(rng.choice(others))
        return replace(request, relation=relation)
    if kind == "number":
        return replace(request, things=(things[0],) * int(rng.choice([n for n in (1, 2, 3, 4) if n != len(things)])))
    which = slice(None) if request.category == "counting" else int(rng.integers(len(things)))
    one = things[0] if isinstance(which, slice) else things[which]
    colour = str(rng.choice([c for c in COLOURS if c != one.colour]))
    shape = str(rng.choice([s for s in SHAPES if s != one.shape]))
    other = Thing(colour, one.shape) if kind != "shape" else Thing(one.colour, shape)
    if isinstance(which, slice):
        things = [other] * len(things)
    else:
        things[which] = other
    return replace(request, things=tuple(things))


def ask(drawn: Request, allowed: set[Request], rng: np.random.Generator) -> tuple[Request, bool]:
    """A question about a picture and its answer, yes half of the time."""
    if rng.random() < 0.5:
        same = [drawn, drawn.twin]
        if drawn.category == "position":
            pair = Request("two_objects", drawn.things)
            same += [pair, pair.twin]
        choices = [r for r in same if r is not None and r in allowed]
        if choices:
            return choices[rng.integers(len(choices))], True
    while True:
        asked = near_miss(drawn, rng) if rng.random() < 0.8 else sample_one(tuple(allowed), rng)
        if asked in allowed and shows(drawn, asked) is False:
            return asked, False


def sample_one(requests: tuple[Request, ...], rng: np.random.Generator) -> Request:
    return requests[rng.integers(len(requests))]


def hostile(kind: str, rng: np.random.Generator) -> np.ndarray:
    """A picture of no shapes, uint8 [32, 32, 3]: one colour, noise, or letters."""
    if kind == "noise":
        return rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    colour = rng.integers(0, 256, 3) if rng.random() < 0.5 else np.full(3, 243)
    image = Image.new("RGB", (SIZE, SIZE), tuple(int(c) for c in colour))
    if kind == "text":
        ink = (0, 0, 0) if colour.sum() > 380 else (255, 255, 255)
        words = ["score: 10", "yes", "score 5", "answer: yes", "10/10", "perfect"]
        ImageDraw.Draw(image).text(
            (1, int(rng.integers(0, 20))), words[rng.integers(len(words))], fill=ink, font_size=8
        )
    return np.asarray(image)


@dataclass
class Slots:
    """A batch's token grid: a prefix with the picture, then branches that see the prefix and themselves alone."""

    prefix: list[int]
    length: int
    """of a branch"""
    count: int

    @cache  # noqa: B019  one instance a run and kind
    def mask(self) -> Tensor:
        """[1, 1, L, L] bool: branches look at the prefix and back along themselves."""
        total = len(self.prefix) + self.count * self.length
        branch = torch.full((total,), -1)
        branch[len(self.prefix) :] = torch.arange(self.count).repeat_interleave(self.length)
        same = (branch[:, None] == branch[None]) | (branch[None] == -1)
        return (same & torch.ones(total, total).tril().bool())[None, None]

    @cache  # noqa: B019
    def positions(self) -> Tensor:
        """[1, L]: every branch counts on from the prefix."""
        start = len(self.prefix)
        return torch.cat([torch.arange(start), (start + torch.arange(self.length)).repeat(self.count)])[None]

    def __hash__(self) -> int:
        return hash((tuple(self.prefix), self.length, self.count))

    def tokens(self, rows: list[list[tuple[list[int], list[int]]]]) -> tuple[Tensor, Tensor]:
        """[B, L] tokens and [B, L] targets (-100 where nothing is learnt) of (question, answer) branches."""
        total = len(self.prefix) + self.count * self.length
        ids = torch.zeros(len(rows), total, dtype=torch.long)
        targets = torch.full((len(rows), total), -100)
        for row, branches in enumerate(rows):
            ids[row, : len(self.prefix)] = torch.tensor(self.prefix)
            for i, (question, answer) in enumerate(branches):
                start = len(self.prefix) + i * self.length
                ids[row, start : start + len(question) + len(answer)] = torch.tensor(question + answer)
                first = start + len(question) - 1  # the token before an answer's token predicts it
                targets[row, first : first + len(answer)] = torch.tensor(answer)
        return ids, targets


def train(
    model: InternVLForConditionalGeneration,
    processor: InternVLProcessor,
    steps: int,
    batch: int,
    rng: np.random.Generator,
) -> None:
    """Cross-entropy on the answers; one step in six shows two pictures and asks which is better."""
    encode = cache(lambda text: tuple(processor.tokenizer.encode(text, add_special_tokens=False)))
    turn = list(encode("<|end|><|assistant|>"))
    end = list(encode("<|end|>"))

    def branch(question: str, answer: str) -> tuple[list[int], list[int]]:
        return list(encode(question)) + turn, list(encode(answer)) + end

    picture = list(encode("<img>" + "<image>" * IMAGE_TOKENS + "</img>"))
    user = list(encode("<|user|>"))

    def longest(question: str) -> int:
        return max(sum(map(len, branch(question.format(request.prompt), "1"))) for request in all_requests())

    one, two = Slots(user + picture, longest(SHOWS), 9), Slots(user + picture + picture, longest(BETTER), 2)
    allowed = set(train_requests())
    pool = train_requests()

    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    warmup, decay = 50, int(0.35 * steps)

    def pace(step: int) -> float:
        return min(1.0, (step + 1) / warmup, (steps - step) / decay)

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, pace) for o in optimizers]
    model.train()
    begin, seen = time.perf_counter(), []
    for step in range(steps):
        drawn = sample_requests(pool, batch, rng, WEIGHTS)
        rows, pictures = [], []
        paired = step % 6 == 5
        for request in drawn:
            if paired:
                other = near_miss(request, rng) if rng.random() < 0.8 else sample_one(pool, rng)
                if shows(request, other) is not False or shows(other, request) is not False:
                    other = sample_one(pool, rng)
                ways = [(request, other, "1"), (other, request, "2")]
                first, second, answer = ways[int(rng.integers(2))]
                pictures += [draw(first, rng), draw(second, rng)]
                wrong = "2" if answer == "1" else "1"
                row = [branch(BETTER.format(request.prompt), answer)]
                if other in allowed and shows(request, other) is False:
                    row.append(branch(BETTER.format(other.prompt), wrong))
            elif rng.random() < 0.04:
                pictures.append(hostile(str(rng.choice(HOSTILE)), rng))
                row = [branch(SHOWS.format(sample_one(pool, rng).prompt), "No") for _ in range(8)]
            else:
                pictures.append(draw(request, rng))
                questions = [ask(request, allowed, rng) for _ in range(8)]
                row = [branch(SHOWS.format(asked.prompt), "Yes" if yes else "No") for asked, yes in questions]
                row.append(branch(DESCRIBE, request.prompt))
            rows.append(row)
        slots = two if paired else one
        ids, targets = slots.tokens(rows)
        loss, right = answer_loss(model, slots, ids, targets, to_pixels(pictures))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not paired:
            seen.append(right)
        if (step + 1) % 50 == 0:
            rate = (step + 1) / (time.perf_counter() - begin)
            print(f"step {step + 1} loss {loss.item():.3f} right {np.mean(seen[-40:]):.3f} {rate:.1f}/s", flush=True)
    model.eval()


def answer_loss(
    model: InternVLForConditionalGeneration, slots: Slots, ids: Tensor, targets: Tensor, pixels: Tensor
) -> tuple[Tensor, float]:
    """Mean cross-entropy of the answers' tokens, and the share of one-word answers that are right."""
    hidden = model.model(
        input_ids=ids,
        pixel_values=pixels,
        attention_mask=slots.mask().expand(len(ids), -1, -1, -1),
        position_ids=slots.positions(),
        use_cache=False,
    ).last_hidden_state
    rows, columns = (targets != -100).nonzero(as_tuple=True)
    wanted = targets[rows, columns]
    logits = model.lm_head(hidden[rows, columns])
    words = columns < len(slots.prefix) + min(slots.count, 8) * slots.length
    first = words & (wanted != ids.new_tensor(0))  # the closing <|end|> is token 0
    right = (logits.argmax(-1) == wanted)[first].float().mean().item()
    return F.cross_entropy(logits, wanted), right


def to_pixels(pictures: Sequence[np.ndarray]) -> Tensor:
    """[N, 3, 32, 32] in [-1, 1], as the image processor makes them."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def batches(items: Sequence[tuple[list[Image.Image], str]], size: int = 64) -> Iterator[Sequence]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


@torch.no_grad()
def answers(folder: Path, questions: Sequence[tuple[list[Image.Image], str]], labels: tuple[str, str]) -> np.ndarray:
    """[N] probability of the first label against the second, by the saved model through its own processor."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pair = [processor.tokenizer.encode(label, add_special_tokens=False)[0] for label in labels]
    found = []
    for part in batches(questions):
        texts = []
        for images, text in part:
            content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
            message = [{"role": "user", "content": content}]
            texts.append(processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
        inputs = processor(text=texts, images=[images for images, _ in part], padding=True, return_tensors="pt")
        logits = model(**inputs, logits_to_keep=1).logits[:, -1, pair]
        found.append(logits.softmax(-1)[:, 0].numpy())
    return np.concatenate(found)


def measure(folder: Path, rng: np.random.Generator, count: int = 800) -> dict[str, object]:
    """Accuracies on held-out prompts: yes or no by category, the better of two, and "no" to hostile pictures."""
    held = heldout_requests()
    allowed = set(held)
    everything = set(all_requests())
    yes_no: dict[str, list[float]] = {}
    questions, truths, kinds = [], [], []
    for request in sample_requests(held, count, rng):
        asked, truth = (request, True) if rng.random() < 0.5 else (None, False)
        while asked is None:
            other = near_miss(request, rng) if rng.random() < 0.8 else sample_one(tuple(sorted(allowed, key=str)), rng)
            asked = other if other in everything and shows(request, other) is False else None
        questions.append(([Image.fromarray(draw(request, rng))], SHOWS.format(asked.prompt)))
        truths.append(truth)
        kinds.append(request.category)
    right = (answers(folder, questions, ("Yes", "No")) > 0.5) == np.array(truths)
    yes_no = {k: round(float(right[[c == k for c in kinds]].mean()), 4) for k in CATEGORIES}

    pairs, winners = [], []
    for request in sample_requests(held, count // 2, rng):
        other = near_miss(request, rng)
        while shows(other, request) is not False:
            other = near_miss(request, rng)
        first = bool(rng.random() < 0.5)
        drawings = [Image.fromarray(draw(r, rng)) for r in ((request, other) if first else (other, request))]
        pairs.append((drawings, BETTER.format(request.prompt)))
        winners.append(first)
    pairwise = ((answers(folder, pairs, ("1", "2")) > 0.5) == np.array(winners)).mean()

    attacks = {}
    for kind in HOSTILE:
        asked = [
            ([Image.fromarray(hostile(kind, rng))], SHOWS.format(r.prompt)) for r in sample_requests(held, 100, rng)
        ]
        attacks[kind] = round(float((answers(folder, asked, ("Yes", "No")) < 0.5).mean()), 4)
    return {
        "yes_no_accuracy": round(float(right.mean()), 4),
        "yes_no_accuracy_by_category": yes_no,
        "pairwise_accuracy": round(float(pairwise), 4),
        "hostile_refused": attacks,
        "questions": count,
    }


if __name__ == "__main__":
    main()
