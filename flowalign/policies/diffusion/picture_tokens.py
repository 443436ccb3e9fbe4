"""The tokens of a picture, drawn by a pipeline's own language model before the first step, as a policy's actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.writing import Written
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy, without_own_settings
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.token_sampler import MultinomialSampler

WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
"""Classes of transformers that may move the logits, each with its field of `Decoding`."""


@dataclass(kw_only=True)
class PictureTokens(TextRollout):
    """The tokens of B pictures: first those of a small preview, then those that the denoiser makes the picture of."""

    grids: Tensor
    """[B, 2, 3] frames, rows and columns of a picture's tokens, then of its preview's"""


class PictureWriter(LanguagePolicy):
    """The language model of a GLM-Image pipeline, which draws a picture's tokens row by row at places in three axes.

    Prompts, their layout and what the denoiser gets of the tokens are the pipeline's own; the tokens of a seed are
    those of plain `pipe(...)` with this seed, in a batch as well. They are drawn without guidance, by the temperature
    and the cuts of the model's generation_config. The pipeline draws a token that ends the picture and drops it; here
    it is not drawn, and ids beyond the denoiser's codebook, at which the pipeline fails, have no probability.

    Args:
        pipeline: the pipeline, whose language model is trained in its place.
        component: its name in the pipeline.
        device: where it samples and trains.

    Raises:
        ConfigError: the model's generation_config draws by a rule that cannot be scored again.
    """

    untrained = ("model.visual.", "model.vqmodel.")

    def __init__(self, pipeline: DiffusionPipeline, component: str, device: torch.device | str) -> None:
        super().__init__(getattr(pipeline, component), pipeline.processor.tokenizer, device)
        self.pipeline, self.component = pipeline, component
        self.decoding = self._own_decoding()

    @property
    def vocabulary(self) -> int:
        return self.network.config.get_text_config().vision_vocab_size

    @property
    def undrawn(self) -> list[int]:
        return list(range(self.pipeline.transformer.config.prior_vq_quantizer_codebook_size, self.vocabulary))

    def _own_decoding(self) -> Decoding:
        """The rule of the model's own `generate`."""
        network: Any = self.network
        settings, _ = network._prepare_generation_config(None, do_sample=True)
        warpers = [type(each).__name__ for each in network._get_logits_processor(settings)]
        for name in warpers:
            if name not in WARPERS:
                raise ConfigError(
                    f"algorithm.writer: the {self.component}'s generation_config draws by a {name}, which cannot be "
                    f"scored again; {', '.join(WARPERS.values())} can"
                )
        return Decoding(**{WARPERS[name]: getattr(settings, WARPERS[name]) for name in warpers})

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        noise_seeds: Sequence[int],
        call: Mapping[str, Any],
        batch_size: int,
    ) -> Written:
        """The tokens of each prompt's picture, by the seed of its start noise."""
        records, given = [], []
        for start in range(0, len(prompts), batch_size):
            rows = slice(start, start + batch_size)
            record, tokens = self._drawn(prompts[rows], seeds[rows], call["height"], call["width"])
            records.append(record)
            given.append(tokens)
        return Written(
            texts=list(prompts), record=PictureTokens.cat(records), arguments={"prior_token_ids": torch.cat(given)}
        )

    def _drawn(
        self, prompts: Sequence[str], seeds: Sequence[int], height: int, width: int
    ) -> tuple[PictureTokens, Tensor]:
        """The record of one batch, and [B, N] the tokens that the denoiser is given."""
        network: Any = self._bare
        own, records = network.generate, []

        def generate(*, max_new_tokens: int, do_sample: bool, **inputs: Tensor) -> Tensor:
            # all but the token that ends the picture
            length, mask = max_new_tokens - 1, inputs["attention_mask"].bool()
            sampler = MultinomialSampler(seeds, self.decoding, mask, self.undrawn)
            padding = self.tokenizer.pad_token_id
            settings = GenerationConfig(max_new_tokens=length, do_sample=False, pad_token_id=padding)
            with without_own_settings(network):
                sequences: Tensor = own(
                    **inputs,
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([sampler]),
                    # each process for itself: the weights are whole while tokens are drawn
                    synced_gpus=False,
                )
            drawn = torch.ones(len(seeds), length, dtype=torch.bool, device=sequences.device)
            records.append(
                PictureTokens(
                    prompts=list(prompts),
                    prompt_ids=inputs["input_ids"],
                    prompt_mask=mask,
                    completion_ids=sequences[:, mask.shape[1] :],
                    mask=drawn,
                    log_prob=torch.stack(sampler.log_prob, 1),
                    entropy=torch.stack(sampler.entropy, 1),
                    ended=drawn[:, 0],
                    decoding=self.decoding,
                    padding=padding,
                    grids=inputs["image_grid_thw"].unflatten(0, (len(seeds), -1)),
                )
            )
            return sequences

        vars(network)["generate"] = generate
        try:
            with self._autocast():
                tokens, *_ = self.pipeline.generate_prior_tokens(list(prompts), height, width, device=self.device)
        finally:
            del vars(network)["generate"]
        self.forwards += len(prompts)
        [record] = records
        return record, tokens

    def replay_inputs(self, rollout: TextRollout, rows: Tensor, attention: Tensor) -> dict[str, Any]:
        """The places of all tokens, as the network gives them to a prompt and keeps them for what it will draw."""
        assert isinstance(rollout, PictureTokens)
        network: Any = self._bare
        grids = rollout.grids[rows]
        count = torch.full_like(rows, grids.shape[1])
        prompt, _ = network.model.get_rope_index(
            rollout.prompt_ids[rows], grids.flatten(0, 1), count, rollout.prompt_mask[rows].long()
        )
        # the last place is that of the picture's end
        drawn = network.model._cached_decode_position_ids[:, :, : rollout.mask.shape[1]]
        return {"position_ids": torch.cat([prompt, drawn.transpose(0, 1)], 2)}

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what `from_pretrained` of its class or, a LoRA, its `load_adapter` loads."""
        self.network.save_pretrained(str(folder), state_dict=weights)
