"""The models of a run: their files, how they are loaded, and how a student is prepared for training."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig

from stillhouse.config import ConfigError, MtpConfig, RunConfig, StudentConfig, TeacherConfig
from stillhouse.libraries import reading, require_feature
from stillhouse.models import (
    Decoder,
    HiddenPair,
    add_lora,
    balance_routers,
    check_finite_weights,
    draw_lora,
    match_hidden,
    model_fingerprint,
    quantized_identity,
)
from stillhouse.parallel import Layout, Mesh, ModelSource, empty_decoder, load_weights, local_folder, process_count
from stillhouse.parallel.sharded_loading import allocate, read_weights
from stillhouse.run.initial import initial_weights
from stillhouse.run.layouts import layout_of
from stillhouse.signals import SignalStore


class ModelSources:
    """Where the models of a run come from: whole in one process, and each process's own part under a layout."""

    def __init__(self, config: RunConfig, mesh: Mesh):
        self.config, self.mesh, self._device = config, mesh, mesh.device
        self._is_whole = mesh.ranks.size == 1

    def student(self) -> ModelSource:
        """The student, prepared for training."""
        source = self._whole_student() if self._is_whole else self._sharded_student()
        return replace(
            source,
            build=lambda: prepared_for_training(source.build(), self.config),
            teacher_is_base=teacher_is_base(self.config),
        )

    def student_copy(self) -> Decoder:
        """The whole student without values, prepared for training like the one that is trained."""
        return prepared_for_training(self._sharded_student().build(), self.config)

    def teacher(self, section: str, device: torch.device | None = None, *, offload: bool = False) -> ModelSource:
        """A teacher of which each process reads a part. section: the key of its section.

        device: of its weights; None: that of the run. offload: keep its weights in host memory between uses.
        """
        teacher = self.config.teacher_sections[section]
        return self._source(section, str(teacher.model), teacher, device or self._device, offload)

    def whole_teacher(self, section: str) -> ModelSource:
        """A teacher that this process loads as transformers does."""
        teacher = self.config.teacher_sections[section]
        load = partial(load_model, section, str(teacher.model), teacher, self._device)
        return ModelSource(load, name=section, is_proven=True)

    def head_of_store(self, section: str, store: SignalStore, device: torch.device | None = None) -> ModelSource:
        """The teacher of a store with hidden states, of which only the output head can be built."""
        teacher, offload = self.config.teacher_sections[section], self.config.parallel.offload
        assert store.teacher_folder is not None
        return self._source(section, str(store.teacher_folder), teacher, device or self._device, offload)

    def _whole_student(self) -> ModelSource:
        student, seed = self.config.student, self.config.seed

        def build() -> Decoder:
            if student.init is None:
                return load_model("student", student.model, student, self._device)
            source = self._sharded_student()
            empty = source.build()
            assert source.load_weights is not None
            source.load_weights(empty)
            return Decoder(empty.pretrained)  # which verifies it

        def add_weights(decoder: Decoder) -> None:
            draw_lora(decoder, seed)
            if decoder.hidden_match is not None:
                decoder.hidden_match.draw(seed)
            if decoder.mtp is None:
                return
            if decoder.mtp.is_new:
                decoder.mtp.draw(decoder.pretrained, seed)
            else:
                read_weights(decoder, local_folder(student.model, student.revision), "mtp.")
            check_finite_weights(decoder, "student")

        return ModelSource(build, add_weights, name="student", is_proven=student.mtp is None)

    def _sharded_student(self) -> ModelSource:
        """The student with the weights of its files, or with those of `student.init`."""
        student, offload = self.config.student, self.config.parallel.offload
        source = self._source("student", student.model, student, self._device, offload)
        if student.init is None:
            return source
        read = initial_weights(self.config, local_folder(student.model, student.revision))

        def weights(decoder: Decoder) -> None:
            allocate(decoder, self._device, offload=offload)
            read(decoder)
            if decoder.hidden_match is not None:
                decoder.hidden_match.draw(self.config.seed)
            check_finite_weights(decoder, "student")

        return replace(source, load_weights=weights)

    def _source(
        self, which: str, name: str, model: StudentConfig | TeacherConfig, device: torch.device, offload: bool
    ) -> ModelSource:
        """which: the key of the model's section. name: its hub id or folder."""
        if model.trust_remote_code:
            raise ConfigError(
                f"{which}.trust_remote_code", "got true under torchrun: expected a model of transformers' own"
            )
        folder, seed = local_folder(name, model.revision), self.config.seed

        def weights(decoder: Decoder) -> None:
            load_weights(decoder, folder, device, offload=offload)
            draw_lora(decoder, seed)
            if decoder.hidden_match is not None:
                decoder.hidden_match.draw(seed)
            if decoder.mtp is not None:
                decoder.mtp.draw(decoder.pretrained, seed)
            check_finite_weights(decoder, which)

        build = partial(empty_decoder, folder, dtype=model.dtype, attention=model.attention)
        return ModelSource(build, weights, offload=offload, name=which)


def model_fingerprints(config: RunConfig, stores: Mapping[str, SignalStore]) -> dict[str, str]:
    """For the student and each teacher, a hash of the model's files; for a model of the hub, the commit; for a store,
    its identity. A student that is its own teacher has one hash.
    """
    hashes = {"student": source_fingerprint(config.student.model, config.student.revision)}
    if config.student.init is not None:
        hashes["student"] = initial_fingerprint(config, hashes["student"])
    for section, teacher in config.teacher_sections.items():
        if section in stores:
            hashes[section] = stores[section].identity
        elif teacher.model is not None:
            of_files = source_fingerprint(teacher.model, teacher.revision)
            hashes[section] = quantized_identity(of_files, teacher.quantize)
    return hashes


def require_adapters(student: StudentConfig) -> None:
    """Raise ConfigError if the student has an adapter and peft is not installed."""
    if student.adapter is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("student.adapter", "peft is not installed; pip install 'stillhouse[lora]'")


def require_teachers_fit(config: RunConfig, layout: Layout, device: torch.device) -> None:
    """Raise ConfigError for a teacher that cannot be quantized, or be in host memory between uses, in this run."""
    for section, teacher in config.teacher_sections.items():
        if teacher.quantize is not None and layout.degrees.processes > 1:
            raise ConfigError(
                f"{section}.quantize",
                f"got {teacher.quantize} under {layout}, which divides plain weights: expected null, or teacher.url "
                "with `stillhouse serve --quantize`",
            )
        if teacher.offload:
            _require_offload(config, section, layout, device)


def _require_offload(config: RunConfig, section: str, layout: Layout, device: torch.device) -> None:
    key = f"{section}.offload"
    if device.type == "cpu":
        raise ConfigError(
            key, "got true on a CPU, where everything is in host memory already: expected false, or a GPU"
        )
    if section == "teacher" and teacher_is_base(config):
        raise ConfigError(key, "got true for a teacher that is the student without its adapter: expected false")
    degrees = (teacher_layout(config, section) or layout).degrees
    if degrees.processes > 1 and degrees.replicate * degrees.shard == 1:
        raise ConfigError(
            key, f"got true under {degrees}, which does not use FSDP: expected fsdp, replicate or context above 1"
        )


def teacher_is_base(config: RunConfig) -> bool:
    """Whether the teacher is the student without its adapter, so that one model in memory serves as both."""
    student, teacher = config.student, config.teacher
    if student.adapter is None or teacher is None or teacher.url is not None:
        return False
    same = all(getattr(student, key) == getattr(teacher, key) for key in ("model", "revision", "attention"))
    return same and teacher.quantize is None and teacher.dtype in ("auto", student.dtype) and teacher.parallel is None


def teacher_layout(config: RunConfig, section: str = "teacher") -> Layout | None:
    """A teacher's own layout, if its section has the key `parallel`; else None."""
    teacher = config.teacher_sections.get(section)
    if teacher is None or teacher.parallel is None:
        return None
    layout = layout_of(teacher.parallel, process_count(), f"{section}.parallel")
    return replace(layout, offload=config.parallel.offload or teacher.offload)


def source_fingerprint(name: str, revision: str | None) -> str:
    """A hash of the files of a model's folder; for a model of the hub, the commit."""
    if os.path.isdir(name):
        return model_fingerprint(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json"])).name


def initial_fingerprint(config: RunConfig, of_files: str) -> str:
    """A hash of all that the student's first weights depend on. of_files: the hash of the student's own files."""
    init, teacher = config.student.init, config.teacher
    assert init is not None
    values: list[Any] = [of_files, init.source, init.layers, config.seed]
    if init.source == "teacher":
        assert teacher is not None
        values[3] = source_fingerprint(str(teacher.model), teacher.revision)
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def prepared_for_training(student: Decoder, config: RunConfig) -> Decoder:
    """Prepare the student for training: adapter, MTP layers, router losses, activation checkpointing, train mode."""
    adapter = config.student.adapter
    if adapter is not None:
        options = adapter.model_dump(exclude={"type"})
        try:
            add_lora(student, **options, base=config.student.model, revision=config.student.revision)
        except ValueError as error:
            raise ConfigError("student.adapter.targets", str(error)) from error
    if config.student.mtp is not None:
        _add_mtp(student, config.student.mtp)
    if config.objective.router_aux_loss:
        try:
            balance_routers(student)
        except ValueError as error:
            raise ConfigError("objective.router_aux_loss", str(error)) from error
    if config.objective.hidden:
        _match_hidden(student, config)
    if config.train.activation_checkpointing:
        student.gradient_checkpointing_enable()
    return student.train()


def hidden_pairs(config: RunConfig) -> list[HiddenPair]:
    return [HiddenPair(each.student, each.teacher, each.loss, each.scale) for each in config.objective.hidden]


def _match_hidden(student: Decoder, config: RunConfig) -> None:
    """Add the projectors of the hidden-state loss, without values, and its hooks."""
    assert config.teacher is not None
    with reading(f"the configuration of {config.teacher.model!r} cannot be read"):
        teacher = AutoConfig.from_pretrained(
            str(config.teacher.model),
            revision=config.teacher.revision,
            trust_remote_code=config.teacher.trust_remote_code,
        ).get_text_config()
    try:
        match_hidden(student, hidden_pairs(config), teacher.num_hidden_layers, teacher.hidden_size)
    except ValueError as error:
        raise ConfigError("objective.hidden", str(error)) from error


def _add_mtp(student: Decoder, mtp: MtpConfig) -> None:
    """Add the layers of multi-token prediction, without values."""
    try:
        require_feature("multi-token prediction")
    except ValueError as error:
        raise ConfigError("student.mtp", str(error)) from error
    from stillhouse.models.mtp import add_mtp, declared_depths, freeze_main

    declared = declared_depths(student.config) if mtp.init == "auto" else 0
    if declared not in (0, mtp.depths):
        raise ConfigError(
            "student.mtp.depths",
            f"got {mtp.depths}, but the student's configuration has num_mtp_layers={declared}: expected {declared},"
            " or student.mtp.init=new",
        )
    try:
        add_mtp(student, mtp.depths, is_new=not declared)
    except ValueError as error:
        raise ConfigError("student.mtp", str(error)) from error
    if mtp.train == "heads":
        freeze_main(student)


def load_model(which: str, name: str, model: StudentConfig | TeacherConfig, device: torch.device) -> Decoder:
    """Load a model onto the device and check that its weights are finite. which: its name in errors."""
    try:
        decoder = Decoder.from_pretrained(
            name,
            revision=model.revision,
            dtype=model.dtype,
            attention=model.attention,
            trust_remote_code=model.trust_remote_code,
            device=device,
            quantize=model.quantize if isinstance(model, TeacherConfig) else None,
        )
    except ValueError as error:
        raise ValueError(f"{which}: {error}") from error
    check_finite_weights(decoder, which)
    return decoder
