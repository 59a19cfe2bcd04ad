"""Checks a model's folder by the names of its files. It needs no torch, so that a wrong path is reported at once."""

import importlib.util
import os
import re

from stillhouse.display import escaped, name_list

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TEMPLATE = (".jinja", ".jinja2", ".j2", ".txt")
_GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def require_model(name: str) -> None:
    """Raise ValueError unless a name is a model's folder or GGUF, or has the form of a hub id."""
    if gguf_file(name) is not None:
        require_gguf_packages(name)
        return
    require_model_folder(name)
    if not os.path.exists(name) and _HUB_ID.fullmatch(name) is None:
        raise ValueError(f"got {name!r}: expected an existing folder, or a hub id such as Qwen/Qwen3-8B")


def require_gguf_packages(name: str) -> None:
    """Raise ValueError unless the packages that read a GGUF are installed. name: a GGUF, or what has one."""
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise ValueError(f"got {name}, a GGUF: reading it needs packages; pip install 'stillhouse[gguf]'")


def gguf_file(name: str | os.PathLike[str]) -> str | None:
    """The GGUF that a name of a model is, or has as its only model; None for any other name.

    Raises ValueError for a GGUF that does not exist, and for a folder with several of them.
    """
    path = os.fspath(name)
    if not os.path.isdir(path):
        if path.endswith(_GGUF) and not os.path.isfile(path):
            raise ValueError(f"got {path}, but there is no such file: expected an existing GGUF")
        return path if path.endswith(_GGUF) else None
    files = os.listdir(path)
    ggufs = sorted(file for file in files if file.endswith(_GGUF))
    if not ggufs or CONFIG in files:
        return None
    if len(ggufs) > 1:
        raise ValueError(f"{escaped(path)} has {len(ggufs)} GGUFs: expected the path of one of {name_list(ggufs)}")
    return os.path.join(path, ggufs[0])


def require_template(source: str) -> None:
    """Raise ValueError unless a source of a chat template is a file, a model's folder, or has a hub id's form."""
    if os.path.splitext(source)[1] in _TEMPLATE and not os.path.isfile(source):
        raise ValueError(f"got {source}, but there is no such file: expected an existing file, a folder or a hub id")
    if not os.path.isfile(source):
        require_model(source)


def require_model_folder(name: str | os.PathLike[str]) -> None:
    """Raise ValueError for a file and for a folder without a model, but not for a name that does not exist."""
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise ValueError(f"{os.fspath(name)} is a file: expected the folder of a model, or a hub id")
        return
    files = os.listdir(name)
    if _ADAPTER in files:
        require_safetensors(escaped(os.fspath(name)), files)
    if CONFIG not in files:
        paths = [os.path.join(name, file) for file in sorted(files)]
        within = [path for path in paths if os.path.isfile(os.path.join(path, CONFIG))]
        hint = f". There is a {CONFIG} in {name_list(within)}"
        raise ValueError(
            f"{escaped(os.fspath(name))} is a folder without {CONFIG}: expected a model's folder, with "
            f"{CONFIG}, safetensors and a tokenizer{hint if within else ''}"
        )


def require_safetensors(folder: str, files: list[str]) -> None:
    """Raise ValueError if a model's folder has an adapter or only pickled weights. files: names of its files."""
    if _ADAPTER in files:
        raise ValueError(
            f"{folder} holds an adapter ({_ADAPTER}): expected a plain model. For a run of Stillhouse, give its "
            "`model/`, where the adapter is merged; for other adapters, save the result of peft's merge_and_unload()"
        )
    pickled = [file for file in files if file.endswith(_PICKLE)]
    if pickled and not any(file.endswith(".safetensors") for file in files):
        raise ValueError(
            f"{folder} has its weights only as pickle ({name_list(pickled)}). Pickle can run any code when it is "
            "read, so it is refused, even with trust_remote_code: expected safetensors. If you trust the file, "
            "convert it yourself: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
