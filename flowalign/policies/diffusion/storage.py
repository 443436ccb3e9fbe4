"""Pipelines and adapters as diffusers writes and reads them."""

import contextlib
import importlib.util
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin, PipelineQuantizationConfig, TorchAoConfig
from diffusers.loaders.single_file_utils import (
    SingleFileComponentError,
    fetch_diffusers_config,
    load_single_file_checkpoint,
)
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.training_utils import _collate_lora_metadata
from peft import get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import Tensor, nn

from flowalign.errors import ConfigError, FlowalignError, nearest
from flowalign.policies.diffusion.families import family_of
from flowalign.runs.foreign import check_waits
from rewards.hub import hub, reason

ENCODING = {
    "clean_caption",
    "clip_skip",
    "complex_human_instruction",
    "max_sequence_length",
    "prompt_template",
    "skip_text_cleaning",
    "system_prompt",
    "text_encoder_out_layers",
    "tokenizer_max_length",
}
"""Arguments of prompt encodings that are settings; others are prompts, embeddings, devices and the like."""

BUILT: dict[str, tuple[str, ...]] = {"Cosmos2TextToImagePipeline": ("safety_checker",)}
"""Components that a class of pipelines makes by itself, whatever model_index.json says of them."""


def check_options(path: str | Path, encode: Mapping[str, Any], attention: str | None) -> None:
    """Refuse options that a pipeline's class does not know, before its weights are read.

    Args:
        encode: arguments of the pipeline's prompt encoding.
        attention: a diffusers attention backend.

    Raises:
        ConfigError: names the option.
    """
    backends = [backend.value for backend in AttentionBackendName]
    if attention is not None and attention not in backends:
        raise ConfigError(
            f"model.attention: attention backend '{attention}' cannot be used here; {nearest(attention, backends)}"
        )
    saved = load_config(path)
    pipeline: Any = getattr(diffusers, saved["_class_name"], None)
    if not encode or not hasattr(pipeline, "encode_prompt"):
        return
    takers = pipeline.encode_prompt, family_of(saved["_class_name"]).encode
    known = {name for taker in takers for name in inspect.signature(taker).parameters} & ENCODING
    for name, value in encode.items():
        if name not in known:
            raise ConfigError(
                f"model.encode: the prompt encoding of {saved['_class_name']} has no setting '{name}'; "
                f"{nearest(name, known)}"
            )
        if name in ("max_sequence_length", "clip_skip") and (type(value) is not int or value < 0):
            raise ConfigError(f"model.encode.{name}: {value!r} is no number; an integer from 0 works")


def check_arguments(path: str | Path, names: Iterable[str], where: str) -> None:
    """Refuse arguments that the call of a pipeline's class does not take, before its weights are read."""
    name = load_config(path)["_class_name"]
    call = inspect.signature(getattr(diffusers, name).__call__).parameters if hasattr(diffusers, name) else None
    if call is None:
        return
    family = family_of(name)
    # pictures that samples are made from are brought to the sides, also where the call takes none
    sides = ("height", "width") if family.images[1] else ()
    for argument in names:
        if family.renamed.get(argument, argument) not in (*call, *sides):
            raise ConfigError(f"{where}.{argument}: {name} has no {argument}; leave it out")


def network_class(path: str | Path) -> type:
    """Class of the denoiser of a pipeline in a folder or of a hub name."""
    saved = load_config(path)
    kind: type = getattr(diffusers, saved[family_of(saved["_class_name"]).denoiser][1])
    return kind


def makes_videos(pipeline_class: str) -> bool:
    """Whether what a class of pipelines makes are videos."""
    pipeline = getattr(diffusers, pipeline_class, None)
    named = () if pipeline is None else inspect.signature(pipeline.__call__).parameters
    return "num_frames" in named or "frames" in named


def load_config(path: str | Path) -> dict[str, Any]:
    """The model_index.json of a pipeline in a folder or of a hub name.

    Raises:
        ConfigError: there is none, or it names parts that are not diffusers' or transformers': diffusers would import
            whatever module stands there; or its folder holds a pipe, which would be waited for.
    """
    if Path(path, "model_index.json").exists():
        check_waits(Path(path))
    elif Path(path).is_absolute() and not Path(path).exists():
        raise ConfigError(f"no pipeline at '{path}': there is no such folder")
    elif Path(path, "config.json").exists():
        raise ConfigError(f"no pipeline at '{path}': it holds a single network; a language model is of kind 'text'")
    try:
        saved: dict[str, Any] = DiffusionPipeline.load_config(**hub(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no pipeline at '{path}': {reason(error)}") from error
    check_index(path, saved)
    return saved


def check_index(path: str | Path, saved: Mapping[str, Any]) -> None:
    """Refuse a model_index.json that names a pipeline or parts that are not diffusers' or transformers'."""
    name = saved.get("_class_name")
    kind: Any = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(kind) and issubclass(kind, DiffusionPipeline)):
        raise ConfigError(
            f"no pipeline at '{path}': model_index.json names the class {str(name)[:100]!r}, which diffusers "
            f"{diffusers.__version__} does not have; a later diffusers may"
        )
    for component, entry in saved.items():
        # a list of numbers is an argument (Krea 2)
        numbers = isinstance(entry, list) and bool(entry) and all(isinstance(value, int | float) for value in entry)
        made = component in BUILT.get(kind.__name__, ())
        if isinstance(entry, list) and not (numbers or made or entry == [None, None]) and _class_of(entry) is None:
            raise ConfigError(
                f"no pipeline at '{path}': its {component} is {str(entry)[:120]}, which is no class of diffusers or "
                "transformers"
            )
    wanted = [name for name, p in inspect.signature(kind.__init__).parameters.items() if p.default is p.empty]
    if lacking := [component for component in wanted if component not in ("self", "kwargs", *saved)]:
        raise ConfigError(f"no pipeline at '{path}': model_index.json has no {', '.join(lacking)}, which {name} needs")


def _class_of(entry: list[Any]) -> Any:
    """The class that the name of a library and of a class in it stand for; None for those of others."""
    if len(entry) != 2 or not all(isinstance(word, str) for word in entry):
        return None
    library, name = entry
    module = {"diffusers": diffusers, "transformers": transformers}.get(library)
    # the safety checkers and connectors of a few pipelines stand beside them
    module = getattr(diffusers.pipelines, library, None) if module is None and library.isidentifier() else module
    kind = getattr(module, name, None) if inspect.ismodule(module) and not name.startswith("_") else None
    return kind if inspect.isclass(kind) and hasattr(kind, "from_pretrained") else None


@contextlib.contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Say in one line what is wrong with the files of a pipeline, at which the libraries raise errors of all kinds."""
    try:
        yield
    except (FlowalignError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"the pipeline at '{path}' cannot be loaded: {type(error).__name__}: {said}") from error


def described_by(path: str | Path, config: str | None) -> str | Path:
    """The folder or hub name whose model_index.json describes a pipeline: for a single file another one.

    Args:
        config: configuration of a single file; default diffusers' guess from its tensors.

    Raises:
        ConfigError: there is none to be had.
    """
    if Path(path).suffix != ".safetensors" or not Path(path).is_file():
        return path
    described = (
        config or fetch_diffusers_config(load_single_file_checkpoint(str(path)))["pretrained_model_name_or_path"]
    )
    try:
        load_config(described)
    except ConfigError as error:
        raise ConfigError(
            f"model.path: {path} is a single file, and the pipeline that says what its parts are, '{described}', is "
            "neither here nor to be downloaded; model.config: a folder or hub name of such a pipeline"
        ) from error
    return described


def load_single_file(path: str | Path, described: str | Path, dtype: torch.dtype) -> DiffusionPipeline:
    """A pipeline from a single file, or from a file of the denoiser alone and everything else from `described`."""
    saved = load_config(described)
    kind: Any = getattr(diffusers, saved["_class_name"])
    try:
        return kind.from_single_file(str(path), config=str(described), dtype=dtype)
    except SingleFileComponentError:
        denoiser = family_of(saved["_class_name"]).denoiser
        network: type[ModelMixin] = getattr(diffusers, saved[denoiser][1])
        loaded = network.from_single_file(str(path), config=str(described), subfolder=denoiser, dtype=dtype)
        return load_pipeline(described, dtype, **{denoiser: loaded})


def load_pipeline(
    path: str | Path,
    dtype: torch.dtype,
    base_bits: int | str | None = None,
    text_encoders: bool = True,
    **components: object,
) -> DiffusionPipeline:
    """A pipeline from a folder or a hub name. Components saved as absent (SD3 without T5) stay absent.

    Args:
        base_bits: 4, 8 or 'fp8' loads the denoiser quantised, as `quantisation` does; None as it is.
        text_encoders: load them; `load_text_encoders` does it later.
        parts: components that are loaded already.
    """
    saved = load_config(path)
    if not text_encoders:
        components |= dict.fromkeys(_text_encoders(saved))
    absent = {name: None for name, entry in saved.items() if entry == [None, None]}
    absent |= dict.fromkeys(BUILT.get(saved["_class_name"], ()))
    family = family_of(saved["_class_name"])
    if family.package and importlib.util.find_spec(family.package) is None:
        raise ConfigError(f"model.path: {saved['_class_name']} needs {family.package}: pip install {family.package}")
    denoiser = family.denoiser
    quantised = {} if base_bits is None else {"quantization_config": quantisation(base_bits, denoiser, dtype)}
    with _readable(path):
        return DiffusionPipeline.from_pretrained(**hub(path), dtype=dtype, **absent, **quantised, **components)


def load_text_encoders(path: str | Path, dtype: torch.dtype) -> dict[str, Any]:
    """The text encoders of a pipeline in a folder or of a hub name, by their names in it."""
    loaded = {}
    for encoder, (library, name) in _text_encoders(load_config(path)).items():
        kind = _class_of([library, name])
        with _readable(path):
            module = kind.from_pretrained(**hub(path), subfolder=encoder, dtype=dtype)
            loaded[encoder] = module.requires_grad_(False).eval()
    return loaded


def _text_encoders(saved: dict[str, Any]) -> dict[str, Any]:
    """Library and class of each that model_index.json names."""
    return {name: entry for name, entry in saved.items() if name.startswith("text_encoder") and entry != [None, None]}


def quantisation(bits: int | str, denoiser: str, dtype: torch.dtype) -> PipelineQuantizationConfig:
    """Setting with which diffusers loads a denoiser in 4 (NF4) or 8 bits by bitsandbytes, or in 'fp8' by torchao.

    Raises:
        ConfigError: the library is not installed, or bitsandbytes has no GPU.
    """
    if bits == "fp8":
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError("model.base_bits: fp8 needs torchao: pip install 'flowalign[torchao]'; null works")
        from torchao.quantization import Float8WeightOnlyConfig

        return PipelineQuantizationConfig(quant_mapping={denoiser: TorchAoConfig(Float8WeightOnlyConfig())})
    if not torch.cuda.is_available():
        raise ConfigError("model.base_bits: bitsandbytes needs a GPU, and torch finds none here; null works")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("model.base_bits needs bitsandbytes: pip install 'flowalign[bitsandbytes]'")
    if bits == 8:
        options: dict[str, Any] = {"load_in_8bit": True}
    else:
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    return PipelineQuantizationConfig(
        quant_backend=f"bitsandbytes_{bits}bit", quant_kwargs=options, components_to_quantize=[denoiser]
    )


def lora_file(network: str) -> str:
    """The file that diffusers looks for; a second network's name is part of its own."""
    second = "_transformer_2" if network == "transformer_2" else ""
    return f"pytorch_lora_weights{second}.safetensors"


def save_lora(
    pipeline: DiffusionPipeline,
    denoiser: str,
    name: str,
    network: ModelMixin,
    folder: str | Path,
    encoders: Mapping[str, Any],
) -> None:
    """Write the adapter of a network for the pipeline's `load_lora_weights`, or the network's `load_lora_adapter`.

    Args:
        denoiser: the pipeline's name for what adapters belong to.
        name: the pipeline's name for the network.
        encoders: text encoders with adapters, by their names in the pipeline, for the same file.
    """
    if hasattr(pipeline, "save_lora_weights"):
        adapted = {n: m for n, m in {denoiser: network, **encoders}.items() if getattr(m, "peft_config", None)}
        # an earlier peft refuses settings that it does not know, though they be None
        settings = {
            part: {key: value for key, value in own.items() if value is not None}
            for part, own in _collate_lora_metadata(adapted).items()
        }
        type(pipeline).save_lora_weights(
            str(folder),
            weight_name=lora_file(name),
            **{f"{component}_lora_layers": get_peft_model_state_dict(module) for component, module in adapted.items()},
            **settings,
        )
    else:
        network.save_lora_adapter(str(folder), weight_name=lora_file(name))


@contextlib.contextmanager
def _text_encoders_may_be_absent() -> Iterator[None]:
    """Keep back diffusers' warning that a LoRA file has nothing for the text encoders, as most have."""

    def worth_telling(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No LoRA keys associated to")

    logger = logging.getLogger("diffusers.loaders.lora_base")
    logger.addFilter(worth_telling)
    try:
        yield
    finally:
        logger.removeFilter(worth_telling)


def load_lora(pipeline: DiffusionPipeline, name: str, network: ModelMixin, path: str | Path, adapter: str) -> None:
    """Put a LoRA on a network, and on the text encoders where the file has such weights.

    Args:
        name: the pipeline's name for the network.
        path: a folder that `save_lora` wrote, a file, or another folder or a hub name, whose file diffusers finds.
        adapter: its name on the network.

    Raises:
        LookupError: none of it is for this network, or a part is missing or of another network.
    """
    saved = (Path(path) / lora_file(name)).is_file()
    file = {"use_safetensors": True, "weight_name": lora_file(name) if saved else None}
    if not hasattr(pipeline, "load_lora_weights"):
        network.load_lora_adapter(str(path), prefix=None, adapter_name=adapter, **file)
        return
    layout = {"unet_config": network.config} if name == "unet" else {}
    tensors, *_, settings = pipeline.lora_state_dict(str(path), **file, **layout, return_lora_metadata=True)
    prefix = f"{name.removesuffix('_2')}."
    given = {key.removeprefix(prefix) for key in tensors if key.startswith(prefix)}
    for key in given:
        other = key.replace(".lora_A.", ".lora_B.") if ".lora_A." in key else key.replace(".lora_B.", ".lora_A.")
        if other not in given:
            raise LookupError(f"{path} has {key}, and no {other}: it is cut")
    second = {"load_into_transformer_2": True} if name == "transformer_2" else {}
    with _text_encoders_may_be_absent():
        pipeline.load_lora_weights(str(path), adapter_name=adapter, **file, **second)
    # what has other names than diffusers knows is passed over with a warning; a file may be the text encoders' alone
    adapted = [network, *pipeline.components.values()]
    if not any(adapter in (getattr(module, "peft_config", None) or {}) for module in adapted):
        raise LookupError(
            f"{path} has no LoRA for the {name} of {type(pipeline).__name__} under names that diffusers knows; its "
            "own, kohya's and ComfyUI's names work where diffusers converts them"
        )
    _check_complete(path, network, given, adapter, bool(settings))


def _check_complete(path: str | Path, network: ModelMixin, given: set[str], adapter: str, described: bool) -> None:
    """Refuse a LoRA of which layers are missing, or that is of layers which a network does not have.

    Args:
        given: names of the LoRA's tensors.
        adapter: its name on the network.
        described: the file says which layers it is of.
    """
    adapted = {name for name, module in network.named_modules() if isinstance(module, BaseTunerLayer)}
    layers = {name.partition(".lora_")[0] for name in given if ".lora_" in name}
    config = getattr(network, "peft_config", {}).get(adapter)
    missing = {
        name
        for name, module in network.named_modules()
        if described
        and config
        and isinstance(module, nn.Linear | nn.Conv2d)
        and check_target_module_exists(config, name)
    }
    for problem, names in (("lacks", missing - adapted), ("is of layers that are not there:", layers - adapted)):
        if names:
            raise LookupError(f"{path} {problem} {min(names)}, one of {len(names)}: it is cut, or of another model")


def with_weights(network: ModelMixin, weights: dict[str, Tensor], lora: bool) -> ModelMixin:
    """A network like this one with these weights; with LoRA only the adapter has any."""
    with torch.device("meta"):
        whole = type(network).from_config(network.config)
        if lora:
            whole.add_adapter(network.peft_config["default"])
    whole.load_state_dict(weights, strict=not lora, assign=True)
    return whole
