"""`flowalign pairs`: several samples of every prompt, to vote on before there is any run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowalign.app.cli import sampling as options
from flowalign.app.cli.modules import opened
from flowalign.errors import ConfigError
from flowalign.runs.files import check_output, write_atomically

if TYPE_CHECKING:
    from flowalign.data import Prompts
    from flowalign.policies.base import Policy
    from flowalign.policies.settings import SamplingSettings
    from flowalign.runs.samples import Sample

TEMPLATE = """\
# Diffusion-DPO on the votes on these samples, made by `flowalign pairs`:
#   flowalign gallery {folder} --serve
#   flowalign gallery {folder} --export {folder}/votes.jsonl
#   flowalign train {folder}/dpo.yaml
# Every key: flowalign config. Published settings: the recipe sd3/dpo.
{model}
data:
  prompts: {folder}/votes.jsonl
# asked by an evaluation alone, which wants evaluation.prompts; DPO learns from the votes
rewards:
  - {{name: jpeg_size}}
algorithm:
  name: dpo
  # the smaller, the further from the start weights; 100 by Flow-GRPO's authors on SD3, 2000 published for SD1.5
  beta: 100
# the size of the pictures, and how previews are sampled
{rollout}
training:
  iterations: 200
  prompts_per_iteration: 16   # votes an iteration, over all processes
  group_size: 4               # noise levels a vote
  micro_batch_size: 4
  previews: 0
  checkpoint_every: 20
"""


@options.with_sampling
def pairs(
    requested: dict[str, Any],
    model: options.Model,
    prompts: Annotated[str, typer.Argument(help="A file of prompts, a shipped list, or a data set of the hub.")],
    per_prompt: Annotated[int, typer.Option(min=2, help="Samples per prompt; n of them make n (n - 1) / 2 pairs.")] = 4,
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts, spread over the list.")] = None,
    lora: options.Lora = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Seed of the first sample; each next one is one higher.")
    ] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per network call.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")] = Path("pairs"),
    dtype: options.Dtype = "float32",
    trust: options.Trust = False,
) -> None:
    """Sample every prompt with several seeds, for votes in the gallery: so the first round of DPO needs no run."""
    from flowalign.app.gallery.votes import DPO
    from flowalign.app.loading import load_for_sampling
    from flowalign.data import Prompts
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.runs.samples import save_samples

    check_output(output, "--output", folder=True)
    if output.exists():
        raise ConfigError(f"{output} is there already; --output names a new folder")
    prompt_list = Prompts.read(prompts).spread(limit)
    with opened(model, trust):
        policy, sampling = load_for_sampling(model, lora, dtype)
    pictures = isinstance(policy, DiffusersPolicy)
    if pictures:
        options.check_frames(policy, requested.get("num_frames"))
    elif requested:
        raise ConfigError(f"{options.of_pictures(requested)}, and this run trained a language model")
    sampling = sampling.asked(requested | options.given(batch_size=batch_size))
    print(sampling.shown())
    save_samples(output, 0, sampled(policy, sampling, prompt_list, per_prompt, seed))
    if pictures:
        write_atomically(output / DPO, configuration(model, lora, dtype, sampling, output))
    number = len(prompt_list) * per_prompt * (per_prompt - 1) // 2
    print(
        f"{output}: {number} pairs of {len(prompt_list)} prompts; "
        f"flowalign gallery {output} --serve takes votes on them"
    )


def sampled(
    policy: "Policy[Any]", sampling: "SamplingSettings", prompts: "Prompts", per_prompt: int, seed: int
) -> Iterator[tuple["Sample", dict[str, Any]]]:
    """`per_prompt` samples of every prompt, batch by batch, each with the fields of its line in samples.jsonl.

    Sample n of all starts from the noise of `torch.Generator().manual_seed(seed + n)`.
    """
    from tqdm.auto import tqdm

    texts = [text for text in prompts.texts for _ in range(per_prompt)]
    metadata = [record for record in prompts.metadata for _ in range(per_prompt)]
    for begin in tqdm(range(0, len(texts), sampling.batch_size), desc="batches"):
        rows = slice(begin, begin + sampling.batch_size)
        seeds = list(range(seed, seed + len(texts)))[rows]
        generated = policy.make(texts[rows], seeds, sampling, metadata[rows])
        for sample, text, number, record in zip(generated, texts[rows], seeds, metadata[rows], strict=True):
            yield sample, {"prompt": text, "seed": number, "metadata": record}


def configuration(model: str, lora: Path | None, dtype: str, sampling: "SamplingSettings", folder: Path) -> str:
    """YAML for training the model that made the samples, from the same weights."""
    import yaml

    from flowalign.app.loading import ENCODE
    from flowalign.config import load
    from flowalign.policies.settings import Sampling

    section: dict[str, Any] = {"path": model, "dtype": dtype, "lora": {"rank": 32}}
    if model in ENCODE:
        section["encode"] = ENCODE[model]
    if (Path(model) / "config.yaml").is_file():
        section = load(Path(model) / "config.yaml").model.model_dump(mode="json", exclude_unset=True)
        lora = lora or Path(model) / "lora"
    if lora is not None and lora.exists():
        section["lora"] = {"path": str(lora)}
    known = set(Sampling.model_fields) - {"rlg", "rlg_from"}
    rollout = sampling.model_dump(mode="json", include=known, exclude_none=True, exclude_defaults=True)
    return TEMPLATE.format(
        folder=folder,
        model=yaml.safe_dump({"model": section}, sort_keys=False).rstrip(),
        rollout=yaml.safe_dump({"rollout": rollout}, sort_keys=False).rstrip(),
    )
