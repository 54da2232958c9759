"""Models by name, as on the command line: a local Hugging Face folder or `tiny:<model_type>`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from harts.errors import ConfigError, UnsupportedModelError
from harts.models.families import SUPPORTED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TINY = "tiny:"
_MOST_TINY_TOKENS = 1_000_000
"""Tokenizers have up to about 300,000; a stray id would make a model of gigabytes."""
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_model(
    spec: str, *, vocab_size: int, seed: int = 0, dtype: torch.dtype | str = torch.float32
) -> PreTrainedModel:
    """A causal language model on the CPU, in evaluation mode.

    spec: `tiny:<model_type>` makes a small random model with exactly `vocab_size` tokens, drawn
    from `seed`; anything else is a local folder, whose vocabulary must hold at least vocab_size
    tokens (largest token id of the data + 1). Nothing is downloaded. dtype: of the weights, also
    by name (float32, float64, bfloat16).
    Raises ConfigError for a folder that is missing or incomplete, a vocabulary that is too small,
    or a tiny model of more than a million tokens, UnsupportedModelError for a model type that
    harts or transformers does not know.
    """
    transformers = _import_transformers(spec)
    dtype = _torch_dtype(dtype)
    if spec.startswith(_TINY):
        if vocab_size > _MOST_TINY_TOKENS:
            raise ConfigError(
                f"the largest token id of the data is {vocab_size - 1:,}, and {spec} holds at most "
                f"{_MOST_TINY_TOKENS:,} tokens; mend that id, or give the folder of a model"
            )
        tiny = _tiny(spec, vocab_size=vocab_size, seed=seed)
        return _with_experts_for(dtype, _cast(tiny, dtype))
    config = _read_config(spec, transformers)
    known = config.get_text_config().vocab_size
    if known < vocab_size:
        raise ConfigError(
            f"the largest token id of the data is {vocab_size - 1:,}, the vocabulary of {spec} has "
            f"{known:,} tokens; take data and model of the same tokenizer"
        )
    return _with_experts_for(dtype, _load_weights(spec, dtype, transformers))


def load_skeleton(spec: str) -> PreTrainedModel:
    """The modules of a model without its weights (`meta` device for a folder), for the audit.

    Costs no memory for the weights of a folder. Same errors as `load_model`.
    """
    transformers = _import_transformers(spec)
    if spec.startswith(_TINY):
        return _tiny(spec, vocab_size=16, seed=0)
    config = _read_config(spec, transformers)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def _tiny(spec: str, *, vocab_size: int, seed: int) -> PreTrainedModel:
    from harts.models.presets import tiny_model

    return tiny_model(spec.removeprefix(_TINY), vocab_size=vocab_size, seed=seed)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """In place, the dtypes that the same model would have if loaded from a folder.

    In bfloat16 a family keeps some parameters in float32, and buffers (RoPE frequencies, expert
    biases) keep theirs.
    """
    if dtype != torch.bfloat16:
        return model.to(dtype)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made_so = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    dtype_of = {name: parameter.dtype for name, parameter in made_so.named_parameters()}
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype_of[name])
    return model


def _with_experts_for(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    """torch's grouped matmul, the default of MoE layers, has no float64."""
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model


def _import_transformers(spec: str) -> ModuleType:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{spec}: models need the package transformers; pip install 'harts[hf]'"
        ) from None
    return transformers


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; use one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _read_config(spec: str, transformers: ModuleType) -> Any:
    """The config of a local folder, once its model type is known to be supported."""
    path = _config_path(spec)
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); write it again") from None
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type is None:
        raise ConfigError(f"{path}: there is no model_type; give a Hugging Face model folder")
    text_config = raw.get("text_config")
    text_type = text_config.get("model_type", model_type) if text_config else model_type
    if text_type not in SUPPORTED and f"{text_type}_text" not in SUPPORTED:
        raise UnsupportedModelError(
            f"{path}: model type {model_type!r} is not supported; harts knows "
            + ", ".join(SUPPORTED)
        )
    from huggingface_hub.errors import StrictDataclassError

    try:
        return transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"{path}: the installed transformers has no {model_type}; install a newer one "
                "(pip install 'transformers>=5.20')"
            ) from None
        raise ConfigError(f"{path}: not a valid {model_type} config ({_brief(error)})") from None


def _config_path(spec: str) -> Path:
    folder = Path(spec).expanduser()
    if folder.is_file():
        raise ConfigError(f"model {spec} is a file; give the folder that holds its config.json")
    if not folder.is_dir():
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", spec):
            raise ConfigError(
                f"model {spec} is not a folder here, and harts downloads nothing; download it "
                "first and give the folder, or use tiny:<model_type>"
            )
        raise ConfigError(
            f"model {spec}: no such folder; give a local Hugging Face folder or tiny:<model_type>"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {spec}: the folder has no config.json; give a Hugging Face folder"
        )
    return folder / "config.json"


def _load_weights(spec: str, dtype: torch.dtype, transformers: ModuleType) -> PreTrainedModel:
    from safetensors import SafetensorError

    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            Path(spec).expanduser(), local_files_only=True, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model {spec}: the weights cannot be loaded ({_brief(error)})") from None
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers would train on random values in their place
        raise ConfigError(
            f"model {spec}: {len(missing)} parameters have no weights in the folder, the first is "
            f"{missing[0]}; copy the folder again"
        )
    return model.eval()


def _brief(error: Exception) -> str:
    """The start of a message of transformers, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
