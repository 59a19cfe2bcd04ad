"""Converts a GGUF file once to a plain Hugging Face folder in the cache, which every loader then reads.

The folder's name has the hash of the file's content, so that a changed file is another model.
"""

import io
import os
from contextlib import redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from stillhouse.config.model_folder import gguf_file, require_model
from stillhouse.display import print_progress
from stillhouse.gguf.proof import GgufFile
from stillhouse.gguf.tokenizer import gguf_tokenizer
from stillhouse.hashing import file_hash
from stillhouse.libraries import reading
from stillhouse.output.cached_folder import cache_root, unless_complete
from stillhouse.parallel import is_first

#: keys of the configuration that describe the file, not the model
_OF_FILE = ("quantization_config", "_name_or_path", "transformers_version")


def plain_folder(name: str | os.PathLike[str]) -> str:
    """Return the plain folder of a GGUF, or the name itself if it is none.

    name: a file, a folder whose only model is a GGUF, or any other name of a model. Raises ValueError if the file
    cannot be converted, or if the result cannot be proven equal to the file.
    """
    file = gguf_file(name)
    if file is None:
        return os.fspath(name)
    require_model(file)
    path = Path(file)
    digest = file_hash(path)
    folder = cache_root() / "gguf" / f"{path.stem}-{digest[:16]}"
    with unless_complete(folder) as partial:
        if partial is not None:
            if is_first():
                print_progress(f"{path}: dequantizing it to float32, once")
            convert(path, partial, digest)
    if is_first():
        print_progress(f"{path}: a GGUF; its weights, dequantized to float32, are read from {folder}")
    return os.fspath(folder)


def convert(path: Path, folder: Path, digest: str) -> None:
    """Write a GGUF as a plain folder with float32 weights. digest: the sha256 of the file, which must not change.

    Raises ValueError if the file cannot be read, if it changes, or if it has anything that is not proven.
    """
    disable_progress_bar()
    file = GgufFile(path)
    architecture = file.family.model_type
    tokenizer = gguf_tokenizer(path, file.metadata)
    # transformers draws a progress bar for the tensors
    with reading(f"{path} cannot be loaded as a {architecture} model"), redirect_stderr(io.StringIO()):
        read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
        )
    file.require_equal(read)
    if len(tokenizer) > read.config.vocab_size:
        raise ValueError(f"{path}: its tokenizer has {len(tokenizer)} tokens, and its head {read.config.vocab_size}")
    settings = {key: value for key, value in read.config.to_dict().items() if key not in _OF_FILE}
    # a model that was read from a GGUF cannot be saved; its weights can
    with torch.device("meta"):
        plain = type(read)(type(read.config).from_dict(settings))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if file_hash(path) != digest:
        raise ValueError(f"{path} has changed while it was read: expected a file that nobody writes; try again")
