"""Servers that draw texts: one request a text, weights by files, a few texts of each part compared with the policy."""

import copy
import json
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowalign.data.batches import Batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout, right_padded
from flowalign.rollouts.engine import Generated, SamplingWeights
from flowalign.rollouts.language import LanguageSampler
from flowalign.rollouts.processes import Processes
from flowalign.runs.files import write_folder
from flowalign.training.distributed.sharding import copied
from flowalign.training.engines.compared import all_alike, unlike
from flowalign.training.engines.completions import DrawnText, Wanted, read
from flowalign.training.engines.servers import AdapterServers, ServerLost, fingerprint, in_turn
from flowalign.training.engines.text_settings import TextSettings
from rewards.http import token_in

logger = logging.getLogger(__name__)
CHECKED = 8
"""Texts of a part that are replayed, and of a run's first part asked for once more."""
COMPARED = 8
"""Tokens of a text that must come again for the same seed; later ones may differ by rounding."""
UNCLIPPED = 0.2
"""Clip range that differences are compared with, where a loss has none."""
LAST = 5.0
"""Seconds that a server gets to forget an adapter at a run's end."""


@dataclass(eq=False)
class PublishedTexts:
    """Weights as files that servers read."""

    weights: SamplingWeights
    name: str
    """Name of the adapter or version on the servers, another one for other weights."""
    folder: Path


@dataclass(eq=False, kw_only=True)
class ServedTexts:
    """A part that servers draw.

    Args:
        bodies: the request of each text.
        wanted: what its answer must fit.
        drawn: address of the server that answers, and the text.
    """

    engine: "TextServers"
    part: Batch
    published: PublishedTexts
    ids: Tensor
    mask: Tensor
    bodies: list[bytes]
    wanted: list[Wanted]
    drawn: list[Future[tuple[str, DrawnText]]]

    def result(self) -> Generated:
        return self.engine.result(self)


class TextServers:
    """Draws texts on servers of one kind; each has a subclass.

    Args:
        settings: where the servers are.
        algorithm: the run's.
        folder: the run's folder.

    Raises:
        ConfigError: no server answers there, or one has another model.
    """

    Settings: ClassVar[type[TextSettings]] = TextSettings
    start: ClassVar[str]
    """Command that starts a server."""
    raw: ClassVar[str]
    """Remedy where log-probabilities are not those of the distribution that was drawn from."""
    seeds: ClassVar[str]
    """Remedy where the same seed draws another text."""
    settings: Any

    def __init__(
        self, settings: Any, algorithm: Any, sampler: LanguageSampler, processes: Processes, folder: Path
    ) -> None:
        self.settings, self.algorithm, self.sampler, self.processes = settings, algorithm, sampler, processes
        self.policy: LanguagePolicy = sampler.policy
        self.decoding = Decoding.of(sampler.config.rollout)
        self.folder = Path(settings.weights_folder or folder).resolve() / "engine"
        urls = [url.rstrip("/").removesuffix("/v1") for url in settings.url]
        self.servers = AdapterServers(
            "rollout.engine",
            list(dict.fromkeys(in_turn(urls, processes.row, processes.rows))),
            settings.timeout,
            settings.retries,
            settings.patience,
            self.load,
        )
        if settings.token_variable is not None:
            self.servers.client.headers["Authorization"] = f"Bearer {token_in(settings.token_variable)}"
        self.models = {server.url: self._met(server.url) for server in self.servers.servers}
        self.pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="texts")
        self.published: deque[PublishedTexts] = deque()
        """Weights that parts may still be drawn with, the newest last."""
        self.checked = False
        """True once texts were asked for again by their seeds."""
        self.seconds, self.loading, self.asked, self.lags = 0.0, 0.0, 0, list[int]()
        """Seconds of waiting for texts and for weights, texts asked for and ages of weights, since `measured`."""

    # What kinds of servers differ in

    def body(self, model: str, published: PublishedTexts, wanted: Wanted, seed: int) -> dict[str, Any]:
        """The request of a text."""
        raise NotImplementedError

    def load_adapter(self, url: str, published: PublishedTexts) -> None:
        """Let a server read an adapter. Raises FlowalignError where it refuses."""
        raise NotImplementedError

    def drop_adapter(self, url: str, published: PublishedTexts) -> None:
        """Let a server forget an adapter."""
        raise NotImplementedError

    def load_model(self, url: str, published: PublishedTexts) -> None:
        """Let a server read whole weights, and forget what it cached of others. Raises FlowalignError."""
        raise NotImplementedError

    def version(self, url: str) -> str:
        """Name of the whole weights that a server has."""
        raise NotImplementedError

    def check_weights(self, answer: dict[str, Any], published: PublishedTexts) -> None:
        """Raise ValueError where an answer is of other weights."""

    # Servers and their weights

    def _met(self, url: str) -> str:
        """The name of a server's model."""
        try:
            cards = self._models(url)
        except ServerLost as error:
            raise ConfigError(f"rollout.engine.url: no server answers: {error}; {self.start} starts one") from error
        bases = {card["id"]: card for card in cards.values() if card.get("parent") is None}
        name = self.settings.model or next(iter(bases), None)
        if name not in bases:
            raise ConfigError(
                f"rollout.engine.model: {url} has no '{name}', it has {', '.join(sorted(bases)) or 'no model'}"
            )
        context, length = bases[name].get("max_model_len"), self.sampler.config.rollout.max_new_tokens
        if isinstance(context, int) and context <= length:
            raise ConfigError(
                f"rollout.engine: '{name}' at {url} reads {context} tokens, and rollout.max_new_tokens={length} leaves "
                "none for a prompt"
            )
        return str(name)

    def _models(self, url: str) -> dict[str, dict[str, Any]]:
        """The models and adapters that a server names."""
        answer = self.servers.call(url, "/v1/models")
        try:
            return {str(card["id"]): dict(card) for card in answer["data"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"rollout.engine.url: {url}/v1/models answers no list of models") from error

    def publish(self, iteration: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> PublishedTexts:
        return self.republish(SamplingWeights(iteration, copied(parameters), state))

    def republish(self, weights: SamplingWeights) -> PublishedTexts:
        """Write weights to a folder; the servers get them before the first text that is drawn with them."""
        begin, accelerator = time.perf_counter(), self.processes.accelerator
        name = f"flowalign-{fingerprint(self.folder, weights.tensors)}"
        published = PublishedTexts(weights, name, self.folder / name)
        if accelerator.is_main_process and not published.folder.is_dir():
            tensors = {key: tensor.contiguous() for key, tensor in weights.tensors.items()}
            write_folder(published.folder, lambda folder: self.policy.save(folder, tensors))
        accelerator.wait_for_everyone()
        self._keep(published)
        self.loading += time.perf_counter() - begin
        return published

    def _keep(self, published: PublishedTexts) -> None:
        """Forget weights that no part is drawn with any more, here and on the servers."""
        self.published.append(published)
        while len(self.published) > self.settings.staleness + 1:
            self._forget(self.published.popleft())

    def _forget(self, old: PublishedTexts) -> None:
        if not self.processes.accelerator.is_main_process or old.name in {each.name for each in self.published}:
            return
        for server in self.servers.servers if self.policy.lora else ():
            try:
                self.drop_adapter(server.url, old)
            except (ServerLost, FlowalignError) as error:
                logger.debug("%s keeps %s: %s", server.url, old.name, error)
        shutil.rmtree(old.folder, ignore_errors=True)

    def load(self, url: str, published: PublishedTexts) -> None:
        """Put weights on a server, unless another process did, and check that they are there."""
        begin = time.perf_counter()
        if not self._has(url, published):
            (self.load_adapter if self.policy.lora else self.load_model)(url, published)
            if not self._has(url, published):
                raise FlowalignError(
                    f"rollout.engine: {url} has taken the weights {published.folder}, and does not name them: it must "
                    "read that very folder (rollout.engine.weights_folder)"
                )
        self.loading += time.perf_counter() - begin

    def _has(self, url: str, published: PublishedTexts) -> bool:
        """Does a server say that it has these weights?"""
        if not self.policy.lora:
            return self.version(url) == published.name
        card = self._models(url).get(published.name)
        return card is not None and card.get("root") == str(published.folder)

    # Texts

    def generate(self, parts: Sequence[Batch], published: PublishedTexts) -> list[ServedTexts]:
        return [self._begin(part, published) for part in parts]

    def _begin(self, part: Batch, published: PublishedTexts) -> ServedTexts:
        length = self.sampler.config.rollout.max_new_tokens
        ids, mask = self.policy.encode(part.prompts, length)
        wanted = [
            Wanted(row[is_token].tolist(), length, self.policy.ends, self.policy.vocabulary)
            for row, is_token in zip(ids, mask, strict=True)
        ]
        # servers of one run have one model
        model = next(iter(self.models.values()))
        bodies = [
            json.dumps(self.body(model, published, each, seed % 2**63)).encode()
            for each, seed in zip(wanted, part.noise_seeds, strict=True)
        ]
        task = ServedTexts(
            engine=self, part=part, published=published, ids=ids, mask=mask, bodies=bodies, wanted=wanted, drawn=[]
        )
        task.drawn = [self._submit(task, row) for row in range(len(part))]
        return task

    def _submit(self, task: ServedTexts, row: int) -> Future[tuple[str, DrawnText]]:
        return self.pool.submit(self._ask, task, row)

    def _ask(self, task: ServedTexts, row: int) -> tuple[str, DrawnText]:
        """A text of one of the servers in turn."""
        wanted = task.wanted[row]
        self.asked += 1
        return self.servers.ask(
            row,
            "/v1/completions",
            task.bodies[row],
            task.published,
            lambda body: self.read(body, task.published, wanted),
            wanted.most_bytes,
        )

    def read(self, body: bytes, published: PublishedTexts, wanted: Wanted) -> DrawnText:
        """The text in an answer; see `completions.read`."""
        text, answer = read(body, wanted)
        self.check_weights(answer, published)
        return text

    def result(self, task: ServedTexts) -> Generated:
        """Wait for the texts of a part; see `Task.result`."""
        begin = time.perf_counter()
        rollout = self._rollout(task, self._waited(task, task.drawn))
        self.seconds += time.perf_counter() - begin
        self.lags.append(task.part.iteration - task.published.weights.iteration)
        self.policy.forwards += len(task.part)
        if task.part.iteration == task.published.weights.iteration:
            # the policy has the weights that drew them
            self._check(rollout)
            if not self.checked:
                self._check_seeds(task, rollout)
            self.checked = True
        sampler = copy.copy(self.sampler)
        # an algorithm passes on what a sampler draws, which has been drawn already
        sampler.rollout = lambda batch: rollout  # type: ignore[method-assign]
        rollout, batch = self.algorithm.rollout(sampler, task.part)
        return Generated(rollout, batch, self.algorithm.decode(self.sampler, rollout))

    def _waited(self, task: ServedTexts, drawn: Sequence[Future[tuple[str, DrawnText]]]) -> list[DrawnText]:
        """The texts; those of a server that has since lost the weights are drawn again."""
        try:
            answers = [future.result() for future in drawn]
            for _ in range(self.settings.retries + 1):
                lost = {url for url in {url for url, _ in answers} if not self._still(url, task.published)}
                if not lost:
                    return [text for _, text in answers]
                rows = [row for row, (url, _) in enumerate(answers) if url in lost]
                logger.warning("%s lost the weights; %d texts are drawn again", ", ".join(sorted(lost)), len(rows))
                again = [self._submit(task, row) for row in rows]
                for row, future in zip(rows, again, strict=True):
                    answers[row] = future.result()
        except BaseException:
            for future in drawn:
                future.cancel()
            raise
        raise FlowalignError(f"rollout.engine: {', '.join(sorted(lost))} loses its weights again and again")

    def _still(self, url: str, published: PublishedTexts) -> bool:
        """Does a server that has just answered have the weights still?"""
        if self.policy.lora:
            # each request names them
            return True
        try:
            if self._has(url, published):
                return True
        except ServerLost:
            pass
        self.servers.forget(url)
        return False

    def _rollout(self, task: ServedTexts, texts: Sequence[DrawnText]) -> TextRollout:
        """The texts with what they were drawn from. Entropies are -log-probabilities, whose mean is the entropy's."""
        policy = self.policy
        log_prob = right_padded([text.log_prob for text in texts], 0.0, policy.device)
        return TextRollout(
            prompts=list(task.part.prompts),
            prompt_ids=task.ids,
            prompt_mask=task.mask,
            completion_ids=right_padded([text.tokens for text in texts], policy.tokenizer.pad_token_id, policy.device),
            mask=right_padded([[True] * len(text.tokens) for text in texts], False, policy.device),
            log_prob=log_prob,
            entropy=-log_prob,
            ended=torch.tensor([text.ended for text in texts], device=policy.device),
            decoding=self.decoding,
            padding=policy.tokenizer.pad_token_id,
        )

    def _check(self, rollout: TextRollout) -> None:
        """Replay a few texts, and refuse log-probabilities that are not the policy's."""
        clip_range = getattr(self.algorithm, "clip_range", None) or UNCLIPPED
        limit = (self.settings.mismatch or math.inf) * clip_range
        said = unlike(self.policy, rollout[list(range(min(CHECKED, len(rollout))))], limit, self.raw)
        if said is not None:
            raise FlowalignError(f"rollout.engine: log-probabilities of {', '.join(self.settings.url)} are {said}")

    def _check_seeds(self, task: ServedTexts, rollout: TextRollout) -> None:
        """Refuse servers for which a seed means nothing: all draw alike, or the same one draws another text."""
        tokens = [row[on].tolist() for row, on in zip(rollout.completion_ids, rollout.mask, strict=True)]
        if all_alike(tokens, (rollout.log_prob * rollout.mask).sum(1).tolist(), task.part.group):
            raise FlowalignError(
                f"rollout.engine: {', '.join(self.settings.url)} draws the same text for all seeds of a prompt: it "
                f"ignores seed or temperature; {self.seeds}"
            )
        rows = range(min(CHECKED, len(tokens)))
        again = [future.result()[1] for future in [self._submit(task, row) for row in rows]]
        other = sum(text.tokens[:COMPARED] != tokens[row][:COMPARED] for row, text in zip(rows, again, strict=True))
        if other > len(rows) / 2:
            raise FlowalignError(
                f"rollout.engine: {', '.join(self.settings.url)} draws other texts for the same seeds ({other} of "
                f"{len(rows)} differ): it ignores seed; {self.seeds}"
            )

    def measured(self) -> dict[str, float]:
        metrics, texts = self.servers.measured(), max(1, self.asked)
        metrics["engine/bytes"] /= texts
        metrics["engine/bytes_sent"] /= texts
        metrics |= {
            "engine/staleness": sum(self.lags) / max(1, len(self.lags)),
            "seconds/engine": self.seconds,
            "seconds/weights": self.loading,
        }
        self.seconds, self.loading, self.asked, self.lags = 0.0, 0.0, 0, []
        return metrics

    def close(self) -> None:
        """Forget the weights here and on the servers."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.servers.timeout = min(self.servers.timeout, LAST)
        while self.published:
            self._forget(self.published.popleft())
        self.servers.close()
