"""The student's initial weights (`student.init`): some of the teacher's layers, or random weights.

Each process reads or computes its own shard. The initial weights are the same under every layout.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from stillhouse.config import ConfigError, StudentConfig, TeacherConfig, as_config_error
from stillhouse.config.sections.student_section import StudentInitConfig
from stillhouse.models import Decoder
from stillhouse.models.decoder import HEAD_WEIGHT
from stillhouse.models.dtensors import set_from_global
from stillhouse.models.families import text_config
from stillhouse.models.layer_numbers import layers_name
from stillhouse.models.pretrained import auto_class, parse_dtype, read_configuration
from stillhouse.parallel import local_folder
from stillhouse.parallel.sharded_loading import read_weights

_KEY = "student.init"
#: keys of config.json that may differ between the teacher and a student that gets layers of the teacher
_MAY_DIFFER = {
    *("num_hidden_layers", "n_layer", "layer_types", "max_window_layers", "vocab_size", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range", "use_cache"),
    *("_name_or_path", "architectures", "transformers_version", "attention_dropout"),
}


def initial_folder(student: StudentConfig, teacher: TeacherConfig | None) -> str | None:
    """Return the folder from which a student with `student.init` gets its weights; None if they are random."""
    assert student.init is not None
    if student.init.source == "random":
        return None
    assert teacher is not None
    assert teacher.model is not None
    return local_folder(teacher.model, teacher.revision)


def initial_weights(student: StudentConfig, teacher: TeacherConfig | None, seed: int) -> Callable[[Decoder], None]:
    """Return a function that writes the initial weights into the allocated tensors of a student, under any layout.

    seed: the seed of random weights. Raises ConfigError if the teacher's layers do not fit the student.
    """
    init, config = student.init, read_configuration(local_folder(student.model, student.revision))
    assert init is not None
    teacher_folder = initial_folder(student, teacher)
    if teacher_folder is None:
        return partial(_initialize_randomly, config=config, dtype=parse_dtype(student.dtype), seed=seed)
    layers = _fitting_layers(init, text_config(config), text_config(read_configuration(teacher_folder)))
    return partial(_read_layers, folder=teacher_folder, layers=layers)


def _fitting_layers(init: StudentInitConfig, student: PreTrainedConfig, teacher: PreTrainedConfig) -> list[int]:
    """The numbers of the teacher's layers that the student gets. Raises ConfigError if they do not fit it."""
    ours, theirs = student.to_dict(), teacher.to_dict()
    different = [key for key in ours | theirs if key not in _MAY_DIFFER and ours.get(key) != theirs.get(key)]
    if different:
        values = ", ".join(f"{key} {ours.get(key)!r} and {theirs.get(key)!r}" for key in different[:4])
        raise ConfigError(
            _KEY,
            f"the student's and the teacher's configuration have {values}: expected the teacher's config.json, with "
            "another number of layers and of padding rows of the vocabulary at most",
        )
    count, needed = teacher.num_hidden_layers, student.num_hidden_layers
    layers = init.chosen(count)
    if len(layers) != needed or not all(0 <= layer < count for layer in layers):
        raise ConfigError(
            f"{_KEY}.layers",
            f"got {init.layers}, which is {layers} of the teacher's {count} layers: expected {needed} of them, as "
            "many as the student has",
        )
    kinds, wanted = getattr(teacher, "layer_types", None), getattr(student, "layer_types", None)
    if kinds is not None and wanted is not None and [kinds[layer] for layer in layers] != list(wanted):
        raise ConfigError(
            f"{_KEY}.layers",
            f"the layer_types of the student are {list(wanted)}, and those of the teacher's layers {layers} are "
            f"{[kinds[layer] for layer in layers]}: expected the same",
        )
    return layers


def _read_layers(decoder: Decoder, folder: str, layers: list[int]) -> None:
    with as_config_error(_KEY):
        name = layers_name(decoder)
    layer_pattern = re.compile(rf"(?<=^{re.escape(f'{decoder.backbone_name}.{name}.')})\d+(?=\.)")
    read_weights(decoder, folder, renamed=partial(_name_in_teacher, layer_pattern, layers))


def _name_in_teacher(layer_pattern: re.Pattern[str], layers: list[int], name: str) -> str:
    """Replace the layer's number in the name of a student's tensor by the number of the teacher's layer."""
    return layer_pattern.sub(lambda match: str(layers[int(match[0])]), name)


@torch.no_grad()
def _initialize_randomly(decoder: Decoder, config: PreTrainedConfig, dtype: Any, seed: int) -> None:
    """Initialize the full model in host memory, as transformers does, and copy this process's shard of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        multimodal = text_config(decoder.config) is not decoder.config
        model = auto_class(config, multimodal=multimodal).from_config(config, dtype=dtype, trust_remote_code=False)
    full = Decoder(model, verify=False)
    values = full.state_dict()
    for name, parameter in decoder.state_dict().items():
        if decoder.is_of_layer_loss(name):
            continue
        # the last stage of a pipeline has its own copy of a tied head
        source = values[full.embedding_name if full.tied and name == HEAD_WEIGHT else name]
        set_from_global(parameter, source)
