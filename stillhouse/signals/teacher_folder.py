"""The folder of a teacher that does not run in the job: its configuration, tokenizer and output head."""

import copy
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from stillhouse.data import save_tokenizer
from stillhouse.models import Decoder
from stillhouse.models.checkpoint_names import checkpoint_names
from stillhouse.models.families import HEAD_NAMES
from stillhouse.models.lm_head import Head
from stillhouse.models.weight_files import tensor_files
from stillhouse.parallel import empty_decoder, load_weights
from stillhouse.parallel.build_runner import only_head


def save_teacher(folder: Path, teacher: Decoder, tokenizer: PreTrainedTokenizerBase, *, with_head: bool) -> None:
    """Save a teacher's configuration and tokenizer and, if `with_head`, its output head under transformers' names."""
    folder.mkdir(exist_ok=True)
    config = copy.deepcopy(teacher.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it describes the layers, which are not in the folder
    config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    if with_head:
        head = teacher.head
        assert isinstance(head, Head)
        weights = {
            checkpoint_names(teacher, f"head.linear.{name}")[0]: value.detach().cpu().contiguous()
            for name, value in head.linear.named_parameters()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def head_of(folder: Path | str, dtype: str = "auto", *, multimodal: bool = False) -> Decoder:
    """Load the output head from a model's folder, on the CPU, without the layers.

    multimodal: whether to load the class that reads media and text, if the family also has a class for text only
    """
    decoder = only_head(partial(empty_decoder, str(folder), dtype=dtype, multimodal=multimodal))
    load_weights(decoder, str(folder), torch.device("cpu"))
    return decoder


def files_of_head(folder: Path) -> list[str]:
    """Return the files in which the output head is, or all files if no weight has a known name of a head.

    The files need not be in the folder, but the index must be there if the model has one.
    """
    files = {name: path.name for name, path in tensor_files(folder, partial=True).items()}
    head_files = {file for name, file in files.items() if name.rpartition(".")[0].endswith(HEAD_NAMES)}
    return sorted(head_files or set(files.values()))
