"""Which files of a model may be read: only safetensors files in its own folder, since a pickle file can run any code.

transformers reads pickle files if the folder has no other weights, or if an index, `transformers_weights` in the
configuration or an adapter beside the model names them. This file refuses all of these before transformers reads.
"""

import json
import os
from typing import Any

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, cached_file

from stillhouse.display import escaped, name_list
from stillhouse.libraries import reading

#: most layers of a model: with a damaged number, transformers would create layers one by one for hours
MOST_LAYERS = 10_000
_ADAPTER = "adapter_config.json"
_SAFETENSORS, _INDEX = ".safetensors", ".safetensors.index.json"
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def require_safe_files(name: str | os.PathLike[str], revision: str | None = None) -> None:
    """Raise ValueError for a folder or hub id whose loading would read other files than its own safetensors files.

    Also raise it for an adapter's folder, and for a configuration with so many layers that it must be damaged. A name
    that does not exist passes: loading it raises the error.
    """
    folder = escaped(os.fspath(name))
    if os.path.isdir(name):
        _require_safetensors(folder, os.listdir(name))
    config = _json_object(name, CONFIG_NAME, revision)
    parts = {"": config} | {f"{name}.": part for name, part in config.items() if isinstance(part, dict)}
    values = {prefix + key: value for prefix, part in parts.items() for key, value in part.items()}
    for key, value in values.items():
        if key.endswith(("layer", "layers")) and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"{folder}/{CONFIG_NAME} has {key} {value}: expected at most {MOST_LAYERS:,}")
    indexes = [SAFE_WEIGHTS_INDEX_NAME]
    if (weights := config.get("transformers_weights")) is not None:
        if not isinstance(weights, str) or not weights.endswith((_SAFETENSORS, _INDEX)):
            raise ValueError(f"{folder}/{CONFIG_NAME}: transformers_weights is {weights!r:.80}: {_EXPECTED}")
        indexes += [weights] if weights.endswith(_INDEX) else []
    for index in indexes:
        _require_own_files(f"{folder}/{index}", _json_object(name, index, revision))


def require_model_folder(name: str | os.PathLike[str]) -> None:
    """Raise ValueError for a file, and for a folder that cannot be a model's. Any other name may be a hub id."""
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise ValueError(f"{os.fspath(name)} is a file: expected the folder of a model, or a hub id")
        return
    files = os.listdir(name)
    if _ADAPTER in files:
        _require_safetensors(escaped(os.fspath(name)), files)
    if CONFIG_NAME not in files:
        within = [each for each in sorted(files) if os.path.isfile(os.path.join(name, each, CONFIG_NAME))]
        hint = f". There is a {CONFIG_NAME} in {name_list([os.path.join(name, each) for each in within])}"
        raise ValueError(
            f"{escaped(os.fspath(name))} is a folder without {CONFIG_NAME}: expected a model's folder, with "
            f"{CONFIG_NAME}, safetensors and a tokenizer{hint if within else ''}"
        )


_EXPECTED = "expected the name of a safetensors file of the same folder; nothing else is read"


def _require_safetensors(folder: str, files: list[str]) -> None:
    if _ADAPTER in files:
        raise ValueError(
            f"{folder} holds an adapter ({_ADAPTER}): expected a plain model. A run's `model/` contains the base "
            "with the adapter merged into it; for another adapter, save the result of peft's merge_and_unload()"
        )
    pickled = [file for file in files if file.endswith(_PICKLE)]
    if pickled and not any(file.endswith(_SAFETENSORS) for file in files):
        raise ValueError(
            f"{folder} has its weights as pickle ({name_list(pickled)}), which can run any code while it is read, so "
            "it is not read, even with trust_remote_code: expected safetensors. If you trust the file, "
            "convert it yourself: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )


def _require_own_files(index: str, content: dict[str, Any]) -> None:
    """Raise ValueError for an index that names other files than safetensors files in its folder.

    content: the index; empty if there is none.
    """
    files = content.get("weight_map", {})
    if not isinstance(files, dict):
        raise ValueError(f"{index}: weight_map is not an object that maps tensors to files")
    for file in files.values():
        if not isinstance(file, str) or not file.endswith(_SAFETENSORS) or os.path.basename(file) != file:
            raise ValueError(f"{index} names the file {file!r:.80}: {_EXPECTED}")


def _json_object(name: str | os.PathLike[str], file: str, revision: str | None) -> dict[str, Any]:
    """Return a JSON file of a folder or hub id; empty if there is none. Raise ValueError if it is no JSON object."""
    what = f"model '{escaped(os.fspath(name))}' cannot be read: its {file}"
    try:
        path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # the name does not exist or cannot be reached
        return {}
    if path is None:
        return {}
    with reading(f"{what} is not JSON"), open(path, encoding="utf-8") as text:
        content = json.load(text)
    if not isinstance(content, dict):
        raise ValueError(f"{what} holds a {type(content).__name__}, expected a JSON object")
    return content
