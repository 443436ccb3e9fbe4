"""The embeddings of prompts, kept so that the text encoders need not stay on the device."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flowalign.data import Source
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.embeddings import EmbeddingStore
from flowalign.policies.diffusion.families import Family
from flowalign.policies.diffusion.sources import opened
from flowalign.policies.diffusion.visiting import visiting

logger = logging.getLogger(__name__)

Prompt = tuple[str, Source | None, tuple[int, int] | None, bool]
"""A text, the pictures that it is encoded with and their size, and whether it is a negative prompt."""

ENCODED_PROMPTS = 4096
"""Largest number of prompts with stored embeddings."""


class PromptEncoder:
    """A pipeline's text encoders and a cache of what they made.

    Args:
        device: where embeddings go, and the encoders to encode; they leave it after.
        options: arguments for the pipeline's prompt encoding, e.g. max_sequence_length.
    """

    def __init__(
        self, pipeline: DiffusionPipeline, family: Family, device: torch.device, options: dict[str, Any]
    ) -> None:
        self.pipeline, self.family, self.device, self.options = pipeline, family, device, options
        self.store: EmbeddingStore | None = None
        """Embeddings from other runs."""
        self.absent: Callable[[], dict[str, Any]] | None = None
        """Loader of the text encoders, where the pipeline came without; None where they are there."""
        self.embeddings: OrderedDict[Prompt, dict[str, Tensor]] = OrderedDict()
        self.place = device
        """Device on which the text encoders encode."""
        self.coming: Callable[[], Sequence[str]] = tuple
        """Function that gives the next prompts; they are encoded with a missing one, in one visit."""
        self.trained = False
        """The text encoders change, so that stored embeddings are old."""

    @property
    def parts(self) -> list[Any]:
        """The text encoders, None for those that the pipeline came without."""
        return [component for name, component in self.pipeline.components.items() if name.startswith("text_encoder")]

    def load(self) -> None:
        """Load the text encoders, where they are not there yet."""
        if self.absent is not None:
            self.pipeline.register_modules(**self.absent())
            self.absent = None

    def embed(self, prompts: Sequence[str], negative: bool = False) -> dict[str, Tensor]:
        """Embeddings [N, ...] of prompts by name, with gradients to the text encoders."""
        distinct = list(dict.fromkeys(prompts))
        encode = self.family.encode_negative if negative else self.family.encode
        encoded = encode(self.pipeline, distinct, device=self.device, **self.options)
        rows = torch.tensor([distinct.index(text) for text in prompts], device=self.device)
        return {name: torch.stack(list(value)).index_select(0, rows) for name, value in encoded.items()}

    @torch.no_grad()
    def encode(
        self,
        prompts: Sequence[str],
        sources: Sequence[Source | None] | None = None,
        size: tuple[int, int] | None = None,
        negative: bool = False,
    ) -> list[Prompt]:
        """Put the embeddings of the distinct prompts into the cache; the text encoders visit the device for it.

        Each is encoded alone: in a batch it would depend, in its last bits, on those it came with, and a resumed run,
        whose cache is empty, would not repeat the uninterrupted one.

        Args:
            sources: the pictures of each prompt, default none.
            size: width and height to bring them to.
            negative: they are what guidance leads away from, which some pipelines encode in another way.

        Returns:
            the key of each in the cache: pictures count where the family encodes them with the prompt.
        """
        if self.trained:
            self.embeddings.clear()
        seen = sources if sources is not None and self.family.encodes_images else [None] * len(prompts)
        keys = [(text, source, size if source else None, negative) for text, source in zip(prompts, seen, strict=True)]
        missing = [key for key in dict.fromkeys(keys) if key not in self.embeddings and not self._stored(key)]
        for key in keys:
            if key in self.embeddings:
                self.embeddings.move_to_end(key)
        if not missing:
            self._forget(len(set(keys)))
            return keys
        self.load()
        self._report_cut([text for text, *_ in missing])
        travels = self.place.type != "cpu" and not self.trained
        if travels and not negative and not self.family.encodes_images:
            later = dict.fromkeys((text, None, None, False) for text in self.coming())
            missing += [key for key in later if key not in {*self.embeddings, *missing} and not self._stored(key)]
        with visiting(self.parts, self.place) if travels else nullcontext():
            for key in missing:
                self.embeddings[key] = self._encoded(*key)
        self._forget(len({*keys, *missing}))
        return keys

    def _encoded(
        self, text: str, source: Source | None, size: tuple[int, int] | None, negative: bool
    ) -> dict[str, Tensor]:
        """The embeddings of a prompt, on the host."""
        if source is None and self.family.encodes_images:
            name = type(self.pipeline).__name__
            raise ConfigError(f"{name} encodes prompts with their pictures, and {text!r} came without")
        pictures = {} if source is None else {"image": opened(source, size)[0]}
        encode = self.family.encode_negative if negative else self.family.encode
        try:
            encoded = encode(self.pipeline, [text], device=self.place, **(self.options | pictures))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            if not self.options:
                raise
            said = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model.encode: {type(self.pipeline).__name__} cannot encode {text[:60]!r} with {self.options}: {said}"
            ) from error
        # laid out as they are read from a file, or products with them would differ in their last bits
        embeddings = {name: value[0].cpu().contiguous() for name, value in encoded.items()}
        if self.store is not None and source is None and not self.trained:
            self.store.write(text, negative, embeddings)
        return embeddings

    def _stored(self, key: Prompt) -> bool:
        """Whether the embeddings were made before, in which case they are now in the cache."""
        text, source, _, negative = key
        if self.store is None or source is not None or self.trained:
            return False
        embeddings = self.store.read(text, negative)
        if embeddings is not None:
            self.embeddings[key] = embeddings
        return embeddings is not None

    def _forget(self, least: int) -> None:
        """Keep the newest embeddings, at least so many."""
        while len(self.embeddings) > max(ENCODED_PROMPTS, least):
            self.embeddings.popitem(last=False)

    def _report_cut(self, prompts: Sequence[str]) -> None:
        for name, limit in self.family.token_limits(self.pipeline, **self.options).items():
            tokens = getattr(self.pipeline, name)(list(prompts), truncation=False, verbose=False).input_ids
            cut = [(len(ids), prompt) for ids, prompt in zip(tokens, prompts, strict=True) if len(ids) > limit]
            if cut:
                length, prompt = cut[0]
                logger.warning(
                    "%d of %d prompts are longer than the %d tokens of the pipeline's %s, which does not see "
                    "their ends; the first has %d: %r",
                    *(len(cut), len(prompts), limit, name, length, prompt),
                )

    def vectors(self, prompts: Sequence[str], sources: Sequence[Source | None] | None = None) -> Tensor:
        """[B, D] one vector a prompt: the mean over its tokens of the text embedding."""
        keys = self.encode(prompts, sources)
        return torch.stack([next(iter(self.embeddings[key].values())).float().mean(0) for key in keys])

    def arguments(
        self,
        prompts: Sequence[str],
        negative: Sequence[str],
        guidance: float,
        source: Source | None = None,
        size: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Embeddings of prompts, and of negative ones where guidance asks for them, for the pipeline's call.

        Raises:
            ConfigError: negative prompts where guidance asks for none.
        """
        sources = [source] * len(prompts)
        embeds = self.family.stack([self.embeddings[key] for key in self.encode(prompts, sources, size)])
        if self.family.negative(guidance):
            keys = self.encode(negative, sources, size, negative=True)
            stacked = self.family.stack([self.embeddings[key] for key in keys])
            embeds |= {f"negative_{name}": value for name, value in stacked.items()}
        elif any(negative):
            raise ConfigError(
                f"negative_prompt: the guidance of {type(self.pipeline).__name__} at scale {guidance:g} "
                f"({self.family.guidance}) has no use for it; leave it out, or raise guidance where it is 1"
            )
        return tree_map_only(Tensor, lambda value: value.to(self.device), embeds)
