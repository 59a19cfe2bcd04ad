"""Exports the student of a run or a checkpoint as a plain Hugging Face folder: `stillhouse export`.

Under every layout, a checkpoint contains the student as full (not sharded) tensors. So an export needs only one
process, with one file of weights in memory at a time. Merging an adapter loads the full model into host memory.
"""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stillhouse.checkpoint.checkpoint_folder import (
    RESUME,
    IntactCheckpoint,
    best_checkpoint,
    checkpoints,
    stored_tensors,
    verified,
)
from stillhouse.checkpoint.export_weights import save_merged, write_weights
from stillhouse.checkpoint.resume import configuration_hash
from stillhouse.config import RunConfig, StudentConfig, load_config
from stillhouse.engine.state_folder import RANDOM
from stillhouse.libraries import reading
from stillhouse.models.families import without_mtp
from stillhouse.models.pretrained import auto_class, parse_dtype, read_configuration
from stillhouse.output.disk import atomic_folder, file_names
from stillhouse.output.folder import RunFolder
from stillhouse.output.model_card import model_card, quoted_file
from stillhouse.output.progress import STATE
from stillhouse.run.models import source_fingerprint
from stillhouse.run.setup import RunSetup, with_plain_models

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHTS, _STUDENT = ".safetensors", "student/"


@dataclass(frozen=True)
class ExportSettings:
    """The options of an export.

    merge: whether an adapter is merged into its base model. None means true for a student with an adapter.
    dtype: the dtype of the weights, or None for the dtype of training.
    shard_bytes: the largest size of one file.
    card: whether README.md is written. mtp: whether the student's MTP layers are exported.
    """

    merge: bool | None = None
    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    card: bool = True
    mtp: bool = True


def export_run(path: Path, out: Path, step: str | None, settings: ExportSettings) -> IntactCheckpoint:
    """Write the student of a run's folder or of a checkpoint to the new folder `out`, and return the checkpoint.

    step: the step of a run's checkpoint, "best" or "last"; None means "last", or "best" for a run with eval.patience.
        Must be None if `path` is a checkpoint.

    Raises ValueError if `path` is neither a run nor a checkpoint, if the checkpoint is damaged or removed during the
    export, if an adapter's base has changed, or if the dtype cannot represent the weights.
    """
    out = out.resolve()  # `out` may be a link to an empty folder
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} exists and is not empty: expected a new folder")
    checkpoint = verified(_chosen(path, step), with_student=True)
    student, run = checkpoint.path / "student", checkpoint.path.parent.parent
    has_adapter = (student / ADAPTER_CONFIG).is_file()
    if settings.merge is not None and not has_adapter:
        raise ValueError(f"{checkpoint.path} has no adapter: expected neither --merge nor --adapter")
    if not settings.mtp and not _config_and_mtp(student)[1]:
        raise ValueError(f"--no-mtp: the student of {checkpoint.path} has no MTP layers: remove this option")
    config: RunConfig | None = None
    if settings.card or has_adapter:
        path = run / "config.yaml"
        if not path.is_file():
            raise ValueError(
                f"{checkpoint.path} is not in the folder of its run: expected <run>/checkpoints/<checkpoint> with "
                f"{path}; without this file, only a student without an adapter can be exported, with --no-card"
            )
        config = load_config(path)
    adapter = "" if not has_adapter else "alone" if settings.merge is False else "merged"
    with atomic_folder(out, exclusive=True) as folder:
        try:
            base = with_plain_models(config).student if config is not None and has_adapter else None
            _write_student(checkpoint, base, settings, folder, merges=adapter == "merged")
            if settings.card:
                assert config is not None
                card = _model_card(run, checkpoint, RunSetup(config), settings, folder, adapter)
                (folder / "README.md").write_text(card, encoding="utf-8")
        except FileNotFoundError as error:
            if all((checkpoint.path / name).exists() for name in checkpoint.state.files):
                raise
            raise ValueError(
                f"{checkpoint.path} was removed while it was exported, because a run keeps only the newest "
                "checkpoint.keep checkpoints: expected a later --step, or a larger checkpoint.keep"
            ) from error
    return checkpoint


def _write_student(
    checkpoint: IntactCheckpoint, base: StudentConfig | None, settings: ExportSettings, folder: Path, *, merges: bool
) -> None:
    """Write the files of the student.

    base: the base model of the student's adapter; None without an adapter. merges: whether the adapter is merged.
    """
    student = checkpoint.path / "student"
    files = [name.removeprefix(_STUDENT) for name in checkpoint.state.files if name.startswith(_STUDENT)]
    models = checkpoint.state.progress.models
    if base is not None and source_fingerprint(base.model, base.revision) != models.get("student"):
        raise ValueError(
            f"student: the files of {base.model} are not those that the adapter in {checkpoint.path} was trained on: "
            "restore them"
        )
    if base is None or not merges:
        _copy(student, files, folder, settings.dtype, settings)
        return
    merged_folder = folder / "merged"
    save_merged(merged_folder, base, student, "float64" if base.dtype == "float64" else "float32")
    _copy(merged_folder, file_names(merged_folder), folder, settings.dtype or base.dtype, settings)
    shutil.rmtree(merged_folder)
    _copy_others(student, [name for name in files if name != ADAPTER_CONFIG], folder)


def _chosen(path: Path, step: str | None) -> Path:
    if (path / STATE).is_file():
        if step is not None:
            raise ValueError(f"--step: {path} is a checkpoint: expected the folder of a run, or remove --step")
        return path
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} is neither a run nor a checkpoint: expected the `out` folder of a run")
    every = checkpoints(RunFolder(path).checkpoints)
    if not every:
        raise ValueError(f"{path} has no complete checkpoint: expected a run that has written one")
    config = load_config(path / "config.yaml")
    if step is None:  # the checkpoint with the weights of the run's final model
        step = "last" if config.eval.patience is None else "best"
    if step == "last":
        return every[-1]
    if step == "best":
        settings = config.checkpoint
        best, damage = None, dict[Path, str]()
        if settings.best is not None:
            best, damage = best_checkpoint(every, settings.best, settings.greater_is_better)
        if damage:
            raise ValueError(f"--step: the best checkpoint is not known: {next(iter(damage.values()))}; name a step")
        if best is None:
            raise ValueError(f"--step: no checkpoint in {path} has the metric of checkpoint.best: name a step")
        return best
    steps = {int(checkpoint.name.rpartition("-")[2]): checkpoint for checkpoint in every}
    number = int(str(step)) if str(step).isdecimal() else -1
    if number not in steps:
        listed = ", ".join(map(str, steps))
        raise ValueError(f"--step: got {step}, expected best, last or one of the steps that {path} has: {listed}")
    return steps[number]


def _config_and_mtp(source: Path) -> tuple[PretrainedConfig | None, tuple[str, ...]]:
    """Return the configuration of a model's folder without MTP layers, and the prefixes of these layers' weights.

    For a folder with only an adapter, the configuration is None.
    """
    if not (source / CONFIG_NAME).is_file():
        return None, ()
    config = read_configuration(str(source))
    return config, tuple(without_mtp(config))


def _copy(source: Path, names: Sequence[str], target: Path, dtype: str | None, settings: ExportSettings) -> None:
    """Copy files of a model or an adapter and convert the weights to `dtype`, with one file in memory at a time."""
    stored = stored_tensors(source)
    wanted = None if dtype is None else parse_dtype(dtype)
    config, mtp_prefixes = (None, ()) if settings.mtp else _config_and_mtp(source)
    kept = _kept_in_float32(source) if wanted in (torch.bfloat16, torch.float16) else []
    with ExitStack() as opened:
        paths = [source / name for name in sorted(names) if name.endswith(_WEIGHTS)]
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        file_of = {name: file for file in files for name in file.keys() if not name.startswith(mtp_prefixes)}  # noqa: SIM118

        def to(name: str) -> torch.dtype:
            trained: torch.dtype = stored[name].properties.dtype
            is_kept = any(part in name.split(".") for part in kept)
            return (
                wanted if trained.is_floating_point and isinstance(wanted, torch.dtype) and not is_kept else trained
            )

        def read(names: Iterable[str]) -> dict[str, Tensor]:
            weights = {name: file_of[name].get_tensor(name).to(to(name)) for name in names}
            for name, weight in weights.items():
                if weight.is_floating_point() and not weight.isfinite().all():
                    expected = "expected bfloat16 or float32"
                    raise ValueError(f"--dtype: {weight.dtype} cannot represent '{name}': {expected}")
            return weights

        shapes = {name: torch.empty(stored[name].size, dtype=to(name), device="meta") for name in file_of}
        name_of_file = ADAPTER_WEIGHTS if (source / ADAPTER_CONFIG).is_file() else SAFE_WEIGHTS_NAME
        write_weights(target, shapes, read, settings.shard_bytes, file=name_of_file)
    if config is not None and mtp_prefixes:
        config.save_pretrained(target)
    _copy_others(source, names, target)
    if dtype is not None and (target / CONFIG_NAME).is_file():
        content = json.loads((target / CONFIG_NAME).read_bytes())
        (target / CONFIG_NAME).write_text(json.dumps(_with_dtype(content, dtype), indent=2) + "\n", encoding="utf-8")


def _copy_others(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy the files without weights (configurations, tokenizer, chat template) that are not yet in `target`."""
    for name in names:
        is_weights = name.endswith(_WEIGHTS) or name == SAFE_WEIGHTS_INDEX_NAME
        if not is_weights and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _kept_in_float32(source: Path) -> list[str]:
    """Return the names of the modules whose weights transformers keeps in float32 for every dtype of the model."""
    if not (source / CONFIG_NAME).is_file():
        return []
    config = read_configuration(str(source))
    with reading(f"{config.name_or_path}: its configuration cannot be read"), torch.device("meta"):
        model = auto_class(config, multimodal=True).from_config(config, trust_remote_code=False)
    return sorted(model._keep_in_fp32_modules_strict or [])


def _with_dtype(content: dict[str, Any], dtype: str) -> dict[str, Any]:
    nested = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in nested.items()}


def _model_card(
    run: Path, checkpoint: IntactCheckpoint, setup: RunSetup, settings: ExportSettings, folder: Path, adapter: str
) -> str:
    progress = checkpoint.state.progress
    if progress.configuration != configuration_hash(setup.values):
        raise ValueError(
            f"{run / 'config.yaml'} is not the configuration that {checkpoint.path.name} was trained with, "
            "or is of another version of stillhouse: restore it, or export without a model card (--no-card)"
        )
    if any(teacher.source_kind.is_store for teacher in setup.teachers.values()):
        # the objective in words depends on the store's signals, which are not read here, so environment.json is read
        path, expected = run / "environment.json", setup.objective.loss_in_words()
        objective = quoted_file(path).get("objective")
        if not isinstance(objective, str) or not objective.startswith(f"{expected}, "):
            raise ValueError(
                f"{path} has the objective {objective!r}: expected an objective that begins with '{expected}'; "
                "restore the file of this run, or export without a model card (--no-card)"
            )
    else:
        objective = setup.objective.in_words({})
    # each tensor-parallel group writes one random state; without tensor parallelism, each process does
    states = [name for name in stored_tensors(checkpoint.path / RESUME) if name.startswith(f"{RANDOM}cpu.")]
    processes = len(states) * setup.config.parallel.tensor or 1
    merge = {None: "", True: " --merge", False: " --adapter"}[settings.merge]
    dtype = "" if settings.dtype is None else f" --dtype {settings.dtype}"
    mtp = "" if settings.mtp else " --no-mtp"
    # a relative path, so that the command can be pasted; the folders of an absolute path may be private
    folder_name = shlex.quote(run.name if run.is_absolute() else str(run))
    command = f"stillhouse export {folder_name} --step {progress.step}{merge}{dtype}{mtp} --out FOLDER"
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored_tensors(folder).values():
        sizes[tensor.properties.dtype] += tensor.size.numel()
    stored_dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    with reading(f"the tokenizer of {folder} cannot be read"):
        has_template = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).chat_template is not None
    return model_card(
        run,
        setup.config,
        progress,
        objective=objective,
        processes=processes,
        command=command,
        dtype=stored_dtype,
        adapter=adapter,
        has_template=has_template,
    )
