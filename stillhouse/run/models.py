"""The models of a run: identifies their files, loads the models, and prepares the student for training.

With `student.init`, the student begins with some of the teacher's layers, or with random weights. Each process reads
or computes only its own shard of these weights. The values are the same under every layout.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from stillhouse.config import ConfigError, StudentConfig, TeacherConfig, as_config_error
from stillhouse.config.student_section import StudentInitConfig
from stillhouse.display import named_if_slow
from stillhouse.engine.losses import LossPart
from stillhouse.models import (
    Decoder,
    add_lora,
    check_finite_weights,
    initialize_lora,
    model_fingerprint,
    prove_decoder,
    quantized_identity,
    train_parts,
)
from stillhouse.models.decoder import HEAD_WEIGHT
from stillhouse.models.document_packing import AUTO
from stillhouse.models.dtensors import set_from_global
from stillhouse.models.families import text_config
from stillhouse.models.forward_modes import remove_noise
from stillhouse.models.layer_hooks import numbered_layers
from stillhouse.models.pretrained import auto_class, parse_dtype, read_configuration
from stillhouse.models.varlen import activations_for
from stillhouse.parallel import Mesh, ModelSource, empty_decoder, load_weights, local_folder
from stillhouse.parallel.sharded_loading import allocate, read_weights

_INIT = "student.init"
#: keys of config.json that may differ between the teacher and a student that gets layers of the teacher
_MAY_DIFFER = {
    *("num_hidden_layers", "n_layer", "layer_types", "max_window_layers", "vocab_size", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range", "use_cache"),
    *("_name_or_path", "architectures", "transformers_version", "attention_dropout"),
}


@dataclass(frozen=True)
class ModelSources:
    """The sources of a run's models: full models in a run of one process, otherwise shards of this process.

    teachers: the sections of all teachers, by their keys
    parts: the losses in addition to the objective; each adds its modules to the student (`LossPart.prepare`)
    mesh: the processes over which each model is distributed
    seed: the seed of new weights
    offload: the value of `parallel.offload`. packing: the value of `data.packing`
    recompute: whether the student uses activation checkpointing
    autocast: the dtype of the student's activations under autocast, or None for the dtype of its weights
    multimodal: whether the models read media in addition to text
    without_noise: whether the student is trained without dropout and without the routers' noise
    removed_noise: the names of the dropout and noise that were removed; filled when the student is built
    """

    student: StudentConfig
    teachers: Mapping[str, TeacherConfig]
    parts: Sequence[LossPart]
    mesh: Mesh
    seed: int
    offload: bool
    recompute: bool
    packing: str
    autocast: torch.dtype | None
    multimodal: bool = False
    without_noise: bool = False
    removed_noise: set[str] = field(default_factory=set)

    @property
    def teacher_is_base(self) -> bool:
        """Whether the teacher is the student without its adapter."""
        return "teacher" in self.teachers and self.teachers["teacher"].is_base_of(self.student)

    @cached_property
    def student_source(self) -> ModelSource:
        """The student, prepared for training."""
        source = self._whole_student() if self.mesh.ranks.size == 1 else self._sharded_student()
        return replace(
            source,
            build=lambda: self._prepared(source.build()),
            teacher_is_base=self.teacher_is_base,
            without_noise=self.without_noise,
        )

    def whole_teacher(self, section: str) -> ModelSource:
        """The source of a teacher that this process loads without sharding, with transformers."""
        options = self.mesh.device, self.packing, None, self.multimodal
        load = partial(load_model, section, self.teachers[section], *options)
        return ModelSource(load, name=section, is_proven=True)

    def sharded(
        self,
        section: str,
        device: torch.device | None = None,
        *,
        offload: bool = False,
        folder: Path | None = None,
        autocast: torch.dtype | None = None,
        weights: str | None = "",
    ) -> ModelSource:
        """Return the source of a sharded model. Each process reads its own shard from the model's files.

        section: the key of the model's section. folder: a folder to read in place of the section's model, for example
            that of a store
        device: the device of the weights, or None for the run's device
        offload: whether the weights are in host memory between uses
        autocast: the dtype of the forward under autocast; None: without autocast. weights: see `empty_decoder`
        """
        model = self.student if section == "student" else self.teachers[section]
        if model.trust_remote_code:
            raise ConfigError(
                f"{section}.trust_remote_code", "got true under torchrun: expected false, and a model of transformers"
            )
        path, device = local_folder(str(folder or model.model), model.revision), device or self.mesh.device

        def load(decoder: Decoder) -> None:
            with named_if_slow(f"loading {section}: {path}"):
                load_weights(decoder, path, device, offload=offload)
            self._draw(decoder)
            check_finite_weights(decoder, section)

        build = partial(
            empty_decoder,
            path,
            dtype=model.dtype,
            attention=model.attention,
            packing=self.packing,
            multimodal=self.multimodal,
            activations=activations_for(model.attention, device, autocast),
            weights=weights,
        )
        return ModelSource(build, load, offload=offload, name=section)

    def _whole_student(self) -> ModelSource:
        student = self.student

        def build() -> Decoder:
            if student.init is None:
                return load_model("student", student, self.mesh.device, self.packing, self.autocast, self.multimodal)
            source = self._sharded_student()
            empty = source.build()
            assert source.load_weights is not None
            source.load_weights(empty)
            prove_decoder(empty)
            return empty

        def add_weights(decoder: Decoder) -> None:
            self._draw(decoder)
            if decoder.mtp is None:
                return
            if not decoder.mtp.is_new:
                read_weights(decoder, local_folder(student.model, student.revision), "mtp.")
            check_finite_weights(decoder, "student")

        return ModelSource(build, add_weights, name="student", is_proven=student.mtp is None)

    def _sharded_student(self) -> ModelSource:
        """Return the source of this process's shard of the student, from files or from `student.init`.

        Raises ConfigError if the teacher's layers do not fit the student.
        """
        if (init := self.student.init) is None:
            return self.sharded("student", offload=self.offload, autocast=self.autocast)
        teacher = self.teachers["teacher"] if init.source == "teacher" else None
        folder = None if teacher is None else local_folder(str(teacher.model), teacher.revision)
        source = self.sharded("student", offload=self.offload, autocast=self.autocast, weights=folder)
        config = read_configuration(local_folder(self.student.model, self.student.revision))
        if folder is None:
            dtype = parse_dtype(self.student.dtype)
            read: Callable[[Decoder], None] = partial(
                _initialize_randomly, config=config, dtype=dtype, seed=self.seed
            )
        else:
            layers = _fitting_layers(init, text_config(config), text_config(read_configuration(folder)))
            read = partial(_read_layers, folder=folder, layers=layers)

        def load(decoder: Decoder) -> None:
            allocate(decoder, self.mesh.device, offload=self.offload)
            read(decoder)
            self._draw(decoder)
            check_finite_weights(decoder, "student")

        return replace(source, load_weights=load)

    def _draw(self, decoder: Decoder) -> None:
        """Initialize weights that are not in files: of LoRA, of losses inside layers, and of new MTP layers."""
        initialize_lora(decoder, self.seed)
        for loss in decoder.layer_losses.values():
            loss.initialize(self.seed)
        if decoder.mtp is not None:
            decoder.mtp.initialize(decoder.pretrained, self.seed)

    def _prepared(self, student: Decoder) -> Decoder:
        """Freeze the parts that are not trained, add the adapter, let each loss prepare the student, enable
        activation checkpointing, and set train mode.
        """
        with as_config_error("student.train"):
            train_parts(student, self.student.train)
        if (adapter := self.student.adapter) is not None:
            options = adapter.model_dump(exclude={"type"})
            with as_config_error("student.adapter.targets"):
                add_lora(student, **options, base=self.student.model, revision=self.student.revision)
        for part in self.parts:
            part.prepare(student, self.student, self.teachers.get("teacher"))
        if self.recompute:
            student.gradient_checkpointing_enable()
        student.train()
        if self.without_noise:
            self.removed_noise.update(remove_noise(student))
        return student


def teacher_fingerprint(teacher: TeacherConfig) -> str:
    """A hash of a teacher's files and of its quantization. For a model on the hub, its commit replaces the files."""
    return quantized_identity(source_fingerprint(str(teacher.model), teacher.revision), teacher.quantize)


def source_fingerprint(name: str, revision: str | None) -> str:
    """A hash of the files of a model's folder, or the commit of a model on the hub."""
    if os.path.isdir(name):
        return model_fingerprint(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json"])).name


def load_model(
    which: str,
    model: StudentConfig | TeacherConfig,
    device: torch.device,
    packing: str = AUTO,
    autocast: torch.dtype | None = None,
    multimodal: bool = False,
) -> Decoder:
    """Load a model and check that its weights are finite.

    which: the model's name in error messages.
    autocast: the dtype of the model's activations, or None for the dtype of the weights.
    multimodal: whether the model reads media in addition to text.
    """
    try:
        with named_if_slow(f"loading {which}: {model.model}"):
            decoder = Decoder.from_pretrained(
                str(model.model),
                revision=model.revision,
                dtype=model.dtype,
                attention=model.attention,
                trust_remote_code=model.trust_remote_code,
                device=device,
                quantize=model.quantize,
                trained=isinstance(model, StudentConfig),
                packing=packing,
                multimodal=multimodal,
                activations=activations_for(model.attention, device, autocast),
            )
    except ValueError as error:
        raise ValueError(f"{which}: {error}") from error
    check_finite_weights(decoder, which)
    return decoder


def _read_layers(decoder: Decoder, folder: str, layers: Sequence[int]) -> None:
    """Read the weights of the student's layers, and all its other weights, from the teacher's folder.

    layers: for each layer of the student, the number of the teacher's layer that it gets.
    """
    with as_config_error(_INIT):
        numbered = numbered_layers(decoder)
    name = next(name for name, module in decoder.backbone.named_modules() if module is numbered)
    prefix = f"{decoder.backbone_name}.{name}."
    number = re.compile(rf"(?<=^{re.escape(prefix)})\d+(?=\.)")
    # in the name of a tensor, replace the number of the student's layer by the number of the teacher's layer
    in_teacher = partial(number.sub, lambda match: str(layers[int(match[0])]))
    read_weights(decoder, folder, renamed=in_teacher)


def _fitting_layers(init: StudentInitConfig, student: PreTrainedConfig, teacher: PreTrainedConfig) -> list[int]:
    """The numbers of the teacher's layers that the student gets. Raises ConfigError if they do not fit."""
    ours, theirs = student.to_dict(), teacher.to_dict()
    different = [key for key in ours | theirs if key not in _MAY_DIFFER and ours.get(key) != theirs.get(key)]
    if different:
        values = ", ".join(f"{key} {ours.get(key)!r} and {theirs.get(key)!r}" for key in different[:4])
        raise ConfigError(
            _INIT,
            f"the student's and the teacher's configuration have {values}: expected the teacher's config.json; "
            "only the numbers of layers and of padding rows of the vocabulary may differ",
        )
    count, needed = teacher.num_hidden_layers, student.num_hidden_layers
    layers = init.chosen(count)
    if len(layers) != needed or not all(0 <= layer < count for layer in layers):
        raise ConfigError(
            f"{_INIT}.layers",
            f"got {init.layers}, which is {layers} of the teacher's {count} layers: expected {needed} of them, as "
            "many as the student has layers",
        )
    kinds, wanted = getattr(teacher, "layer_types", None), getattr(student, "layer_types", None)
    if kinds is not None and wanted is not None and [kinds[layer] for layer in layers] != list(wanted):
        raise ConfigError(
            f"{_INIT}.layers",
            f"the layer_types of the student are {list(wanted)}, and those of the teacher's layers {layers} are "
            f"{[kinds[layer] for layer in layers]}: expected the same types",
        )
    return layers


@torch.no_grad()
def _initialize_randomly(decoder: Decoder, config: PreTrainedConfig, dtype: Any, seed: int) -> None:
    """Initialize the full model in host memory, as transformers does, and copy this process's shard."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        multimodal = text_config(decoder.config) is not decoder.config
        model = auto_class(config, multimodal=multimodal).from_config(config, dtype=dtype, trust_remote_code=False)
    full = Decoder(model, verify=False)
    values = full.state_dict()
    for name, parameter in decoder.state_dict().items():
        if name.partition(".")[0] in decoder.layer_losses:
            continue
        # the last stage of a pipeline has a separate copy of a tied head, which gets the values of the embedding
        source = values[full.embedding_name if full.tied and name == HEAD_WEIGHT else name]
        set_from_global(parameter, source)
