"""DiNa-LRM (arXiv 2602.11146): a reward that reads latents, so that no picture is decoded.

The first half of a diffusion transformer sees noised latents and the prompt; a head draws what several of its layers
made of both together and scores it. The published tensors go into diffusers' Stable Diffusion 3.5.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
import yaml
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.base import Latents, Metadata, RewardError, Scores, Spec, vae_of
from rewards.hub import hub
from rewards.vision import Dtype, load_weights, pick_device, weights_file


class Trunk(nn.Module):
    """The first layers of a Stable Diffusion 3 transformer.

    Args:
        transformer: diffusers' SD3Transformer2DModel.
        depth: layers that are kept.
        visual, text: numbers of the layers, from 1, whose states of the latents and of the prompt the head reads.
    """

    def __init__(self, transformer: Any, depth: int, visual: Sequence[int], text: Sequence[int]) -> None:
        super().__init__()
        self.pos_embed, self.time_text_embed = transformer.pos_embed, transformer.time_text_embed
        self.context_embedder = transformer.context_embedder
        self.transformer_blocks = transformer.transformer_blocks[:depth]
        self.visual, self.text = visual, text

    def forward(self, latents: Tensor, embeds: Tensor, pooled: Tensor, times: Tensor) -> "States":
        """States of latents [B, C, H, W] and prompts [B, L, D], [B, P] at times [B] of 1000."""
        states, time = self.pos_embed(latents), self.time_text_embed(times, pooled)
        words = self.context_embedder(embeds)
        seen, read = [], []
        for number, block in enumerate(self.transformer_blocks, 1):
            words, states = block(hidden_states=states, encoder_hidden_states=words, temb=time)
            seen += [states] if number in self.visual else []
            read += [words] if number in self.text else []
        return time, seen, read


States = tuple[Tensor, list[Tensor], list[Tensor]]
"""Embedding of the time [B, D]; each layer's states [B, patches, D] and [B, words, D]."""


class Adapter(nn.Module):
    """One layer's states, scaled and shifted by the time, and narrowed; names as in the checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer_embed = nn.Parameter(torch.empty(1, 1, width))
        self.cond_mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.proj = nn.Linear(width, width // 4)

    def forward(self, states: Tensor, time: Tensor) -> Tensor:
        """[B, N, width] -> [B, N, width / 4]"""
        scale, shift = self.cond_mlp(time)[:, None].chunk(2, dim=-1)
        narrowed: Tensor = self.proj(states * (1 + scale) + shift + self.layer_embed)
        return narrowed


class Look(nn.Module):
    """Queries look at patches, and perhaps at words too, each of which says how much it is to count."""

    def __init__(self, width: int, heads: int, gated_with_text: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm_q, self.norm_v = nn.RMSNorm(width), nn.RMSNorm(width)
        self.to_q, self.to_k_vis, self.to_v_vis = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(width, width))
        self.with_text = gated_with_text
        if gated_with_text:
            self.norm_t = nn.RMSNorm(width)
            self.to_k_text, self.to_v_text = nn.Linear(width, width), nn.Linear(width, width)
            self.gate_vis, self.gate_text = (
                nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)) for _ in range(2)
            )

    def forward(self, queries: Tensor, seen: Tensor, read: Tensor) -> Tensor:
        """[B, Q, width] from queries [B, Q, width], patches [B, N, width] and words [B, L, width]."""
        query, seen = self.to_q(self.norm_q(queries)), self.norm_v(seen)
        values = self.to_v_vis(seen)
        if not self.with_text:
            return queries + self.to_out(self._drawn(query, self.to_k_vis(seen), values))
        drawn = self._drawn(query, self.to_k_vis(seen), values * self.gate_vis(seen).sigmoid())
        read = self.norm_t(read)
        counted = self.to_v_text(read) * self.gate_text(read).sigmoid()
        return queries + self.to_out(drawn + self._drawn(query, self.to_k_text(read), counted))

    def _drawn(self, *mixed: Tensor) -> Tensor:
        heads = (states.unflatten(-1, (self.heads, -1)).transpose(1, 2) for states in mixed)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Head(nn.Module):
    """The head of DiNa-LRM; names as in the checkpoint.

    Args:
        width: width of the trunk.
        layers: how many of the trunk's layers it reads, of the latents and of the prompt.
        queries, heads: of its attention.
    """

    def __init__(self, width: int, layers: tuple[int, int], queries: int, heads: int) -> None:
        super().__init__()
        self.layer_adapters_visual, self.layer_adapters_text = (
            nn.ModuleList(Adapter(width) for _ in range(count)) for count in layers
        )
        self.agg_visual, self.agg_text = (nn.Linear(count * (width // 4), width) for count in layers)
        self.query_tokens = nn.Parameter(torch.empty(1, queries, width))
        self.attn1, self.attn2 = Look(width, heads, True), Look(width, heads, False)
        self.norm_ff = nn.RMSNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, levels: Sequence[States]) -> Tensor:
        """[B] scores of what the trunk made of the same samples at one or several noise levels."""
        seen = torch.cat([self._joined(self.layer_adapters_visual, self.agg_visual, s, t) for t, s, _ in levels], dim=1)
        read = torch.cat([self._joined(self.layer_adapters_text, self.agg_text, r, t) for t, _, r in levels], dim=1)
        queries = self.attn2(self.attn1(self.query_tokens.expand(len(seen), -1, -1), seen, read), seen, read)
        scores: Tensor = self.head(queries + self.ff(self.norm_ff(queries)))
        return scores.mean(dim=1)[:, 0]

    def _joined(self, adapters: nn.ModuleList, joined: nn.Linear, states: Sequence[Tensor], time: Tensor) -> Tensor:
        """[B, N, width] of several layers' states."""
        made: Tensor = joined(
            torch.cat([adapter(state, time) for adapter, state in zip(adapters, states, strict=True)], dim=-1)
        )
        return made


def merge_lora(network: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Add a LoRA, as peft saves it, to the weights of a network: W + scale B A."""
    for name, down in tensors.items():
        layer, separator, _ = name.partition(".lora_A.")
        if separator:
            weight = network.get_parameter(f"{layer.removeprefix('base_model.model.')}.weight")
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            weight.data += (scale * up.float() @ down.float()).to(weight)


@cache
def load_dina(weights: str, head: str, config: str, base: str, device: str, dtype: Dtype) -> tuple[Trunk, Head, Any]:
    """Trunk, head and the pipeline that reads prompts and pictures; rewards that name the same ones share them."""
    from diffusers import DiffusionPipeline

    saved = DiffusionPipeline.load_config(**hub(base))
    absent = {name: None for name, entry in saved.items() if entry == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(**hub(base), dtype=getattr(torch, dtype), **absent)
    # the authors' is YAML under the name of a JSON file
    settings = yaml.safe_load(weights_file(config).read_text(encoding="utf-8"))["model"]
    layers = settings["visual_head_idx"], settings["text_head_idx"]
    trunk = Trunk(pipeline.transformer, settings["num_transformer_layers"], *layers)
    lora = settings["lora_config"]
    merge_lora(trunk, load_weights(weights), lora["lora_alpha"] / lora["r"])
    sizes = settings["reward_head"]
    head_model = Head(
        pipeline.transformer.inner_dim, (len(layers[0]), len(layers[1])), sizes["num_queries"], sizes["num_attn_heads"]
    )
    head_model.load_state_dict(load_weights(head))
    # the other half is never asked
    pipeline.transformer.transformer_blocks = trunk.transformer_blocks
    pipeline.to(pick_device(device))
    head_model.to(pick_device(device), getattr(torch, dtype))
    for module in (trunk, head_model, pipeline.vae):
        module.eval().requires_grad_(False)
    return trunk, head_model, pipeline


class DiNa:
    """DiNa-LRM: what people prefer, read from latents of Stable Diffusion 3.5 by half of its transformer (2602.11146).

    Not bounded, about -10 to 10.

    Args:
        of: "latents" scores samples as a Stable Diffusion 3 makes them, and nothing is decoded where no other reward
            looks at pictures. "pictures" encodes them by the pipeline's VAE, so that other models' can be scored too.
        sigmas: noise levels at which latents are seen, each from 0, a clean one, to 1; several make one score.
        weights, head, config: the files of the published checkpoint: its LoRA, its head and its settings.
        pipeline: folder or hub name of the Stable Diffusion 3.5 below it.
        batch_size, device, dtype: of the model.
    """

    name = "dina"

    def __init__(
        self,
        of: Literal["pictures", "latents"] = "pictures",
        sigmas: Sequence[float] = (0.4,),
        weights: str = "liuhuohuo/DiNa-LRM-SD35M-12layers/checkpoint/backbone_lora/adapter_model.safetensors",
        head: str = "liuhuohuo/DiNa-LRM-SD35M-12layers/checkpoint/rm_head.pt",
        config: str = "liuhuohuo/DiNa-LRM-SD35M-12layers/config.json",
        pipeline: str = "stabilityai/stable-diffusion-3.5-medium",
        batch_size: int = 8,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
    ) -> None:
        if not sigmas or not all(0 <= sigma <= 1 for sigma in sigmas) or batch_size < 1:
            raise ValueError(f"dina: sigmas {list(sigmas)} are one or more numbers in [0, 1]; batch_size is at least 1")
        self.of = of
        self.trunk, self.head, self.pipeline = load_dina(weights, head, config, pipeline, device, dtype)
        self.batch_size, self.device, self.dtype = batch_size, pick_device(device), getattr(torch, dtype)
        known = self.pipeline.scheduler.sigmas
        # of the levels that the transformer has learned, the nearest
        self.sigmas = [float(known[(known - sigma).abs().argmin()]) for sigma in sigmas]

    @property
    def spec(self) -> Spec:
        return Spec(frozenset({"image" if self.of == "pictures" else "latents", "prompt"}), differentiable=True)

    def __call__(self, samples: Sequence[Image | Latents], prompts: Sequence[str], metadata: Metadata) -> Scores:
        values = []
        for sample, prompt in zip(samples, prompts, strict=True):
            if isinstance(sample, Latents):
                latents = Latents(sample.values[None], sample.vae)
            else:
                pixels = self.pipeline.image_processor.preprocess(sample.convert("RGB")).to(self.device, self.dtype)
                latents = self._encoded(pixels)
            with torch.no_grad():
                values.append(self.score_latents(latents, [prompt]).value)
        return Scores(torch.cat(values).cpu())

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; through the VAE's encoder."""
        return self.score_latents(self._encoded((2 * pixels - 1).to(self.device, self.dtype)), prompts)

    def score_latents(self, latents: Latents, prompts: Sequence[str], metadata: Metadata = ()) -> Scores:
        """See `LatentReward.score_latents`.

        The noise is the same for all and always, so that a sample keeps its score.

        Raises:
            RewardError: latents of another VAE.
        """
        if latents.vae != (known := vae_of(self.pipeline.vae)):
            raise RewardError(f"reward 'dina': it knows latents of {known}, not of {latents.vae}; of: pictures works")
        batches = []
        for i in range(0, len(latents.values), self.batch_size):
            rows = slice(i, i + self.batch_size)
            clean = latents.values[rows].to(self.device, torch.float32)
            with torch.no_grad():
                embeds, _, pooled, _ = self.pipeline.encode_prompt(
                    list(prompts[rows]), None, None, do_classifier_free_guidance=False, max_sequence_length=256
                )
            levels = []
            for number, sigma in enumerate(self.sigmas):
                generator = torch.Generator().manual_seed(number)
                noise = torch.randn(clean.shape[1:], generator=generator).to(clean)
                noised = ((1 - sigma) * clean + sigma * noise).to(self.dtype)
                times = torch.full((len(clean),), 1000 * sigma, device=self.device)
                levels.append(self.trunk(noised, embeds, pooled, times))
            batches.append(self.head(levels).float())
        return Scores(torch.cat(batches))

    def _encoded(self, pixels: Tensor) -> Latents:
        """Latents of pixels in [-1, 1]: the mean, where the authors draw."""
        vae = self.pipeline.vae
        latents: Tensor = vae.encode(pixels).latent_dist.mode()
        return Latents((latents - vae.config.shift_factor) * vae.config.scaling_factor, vae_of(vae))
