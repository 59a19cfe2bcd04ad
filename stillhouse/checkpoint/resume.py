"""The identity of a run, and the checkpoint from which a run resumes.

The checkpoint must be intact, and the run's data and models must not have changed. The identity consists of hashes of
the data, the models and the configuration values that determine the weights. A value that changes the weights only by
rounding errors, such as the layout, is not part of the identity. Servers must still have the models that they had at
the beginning of the run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillhouse.checkpoint.checkpoint_folder import IntactCheckpoint, checkpoints, set_aside, verified
from stillhouse.config import ConfigError, load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.config.signal_source_kind import source_kinds
from stillhouse.data.media import MEDIA
from stillhouse.display import first_line
from stillhouse.hashing import json_hash
from stillhouse.output.disk import UNFINISHED, explained_write_errors, flush
from stillhouse.output.folder import RunFolder, is_leftover
from stillhouse.output.progress import STATE, DamagedCheckpointError, Progress, read_state
from stillhouse.parallel import Ranks, is_first, log_rank0
from stillhouse.registry import load_all
from stillhouse.rollout.engines import RemoteEngine, same_weights
from stillhouse.signals import SignalStore

#: an error message shows values of at most this many characters
SHORT = 40
#: a file with this prefix has the answers of a teacher's servers at the beginning of the run
SERVED_TEACHER = "served_teacher"
#: the file with the answers of servers that generate completions with their own, fixed weights
WRITER = "writer.json"


#: sections and keys that may change when a run is resumed
_FREE = {
    *("out", "eval", "checkpoint", "track", "data.cache", "device", "deterministic", "parallel"),
    *("teacher.parallel", "teacher.offload", "teacher.api", "teacher.timeout", "teacher.token_variable"),
    *("teacher.prove", "teacher.prove_every", "teacher.accept"),
    *("rollout.url", "rollout.weights", "rollout.timeout", "rollout.token_variable", "rollout.reward_tokens"),
    *("rollout.workers", "rollout.worker_timeout", "rollout.worker_memory", "rollout.samples"),
    *("objective.chunk_tokens", "objective.kernels"),
    *("train.micro_batch_tokens", "train.timeout", "train.activation_checkpointing"),
    *(f"teacher.{key}" for key, kind in source_kinds().items() if kind.is_address),
}

#: groups of add-ons whose entries add keys to a section of the configuration, and the name of the section
_KEYS_OF_ADD_ONS = {"stillhouse.environments": "rollout", "stillhouse.parts": "objective"}
#: keys that earlier versions, or machines without an add-on, did not have. A run without such a key behaves as with
#: the key's value in this dict, so it can be resumed
_ADDED: dict[str, Any] = {
    "data.chat_template": None,
    "data.image_pixels": None,
    "data.packing": "auto",
    "data.columns": None,
    "data.turns": "all",
    "train.optimizer": "adamw",
    "train.momentum": 0.95,
    "student.init": None,
    "student.mtp": None,
    "student.train": ["language"],
    "student.quantize": None,
    "teacher.quantize": None,
    "objective.hidden": [],
    "objective.by_origin": None,
    "rollout.deviation": "population",
    "rollout.tools": None,
    "rollout.tool_tokens": 256,
    "rollout.reply": "raw",
    **{f"teacher.{key}": None for key in {*source_kinds()} - {"model", "cache", "student", "cross_tokenizer"}},
    **{
        f"{section}.{name}": kind.field[1].default
        for group, section in _KEYS_OF_ADD_ONS.items()
        for name, kind in load_all(group).items()
        if kind.field is not None
    },
}


#: the key in `RunIdentity.data` for the packing that determines the documents' order. Its value is "rows". If the key
#: is absent, the packing is "packed"
ORDER = "packing"
#: keys in `RunIdentity.models` of runs that generate completions, and their descriptions in errors. The keys'
#: values are the end-of-sequence ids in words, and `text_fingerprint`. Earlier versions did not write these keys
COMPLETION_KEYS = {
    "end_ids": "the ids that end a completion (eos_token_id in generation_config.json, or the tokenizer's eos_token)",
    "text": "the text of ids and conversations (the decoder, the added tokens or the chat template of the tokenizer)",
}
#: `RunIdentity.data` has a hash of a model's media processor under this prefix + the key of the model's section. The
#: documents' hashes also depend on the processor; the separate hash lets an error say that the processor has changed
PROCESSOR = "processor/"
#: the key in `RunIdentity.data` for the names of vectors that are stored with several dims, such as [1, 1, n]. Weight
#: decay does not apply to these vectors; earlier versions applied it to them
DECAY = "weight decay"


@dataclass(frozen=True)
class RunIdentity:
    """The hashes that must be the same when a run is resumed.

    data: a hash of the documents of each split, and the values of the keys `ORDER`, `PROCESSOR` and `DECAY`
    models: a hash of the tokenizer, a hash of each model's files, and the values of `COMPLETION_KEYS`
    """

    configuration: str
    data: dict[str, str]
    models: dict[str, str]


def decisive_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that must not change when a run is resumed. values: all values, by dotted keys."""
    several = [key for key in sorted(values) if key.startswith("teachers.") and isinstance(values[key], Mapping)]
    flat = {key: value for key, value in values.items() if key not in several}
    flat |= {f"{key}.{name}": value for key in several for name, value in values[key].items()}
    if flat.get("rollout", ...) is None:
        del flat["rollout"]  # runs of versions without this section can then be resumed
    free, decisive = tuple(f"{key}." for key in _FREE), dict[str, Any]()
    for key, value in flat.items():
        # the rules for a key such as teachers.<name>.model are those for teacher.model
        single = re.sub(r"^teachers\.[^.]*\.", "teacher.", key)
        if not f"{single}.".startswith(free) and _ADDED.get(single, ...) != value:
            decisive[key] = value
    return decisive


def configuration_hash(values: Mapping[str, Any]) -> str:
    """Return the sha256 of `decisive_values`."""
    return json_hash(decisive_values(values))


def candidates(folder: RunFolder, resume: str, values: Mapping[str, Any]) -> list[Path]:
    """Return the checkpoints from which the run may resume, the preferred one first; an empty list for a new run.

    values: the configuration by dotted keys
    Raises ValueError if the folder contains another run or other files, or is not empty although `resume` is `never`.
    Raises ConfigError if `resume` names a checkpoint that does not exist or may not be used.
    """
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"out: {folder.path} is a file; expected a folder for the run")
    if folder.path.is_dir() and any(not is_leftover(path) for path in folder.path.iterdir()):
        if resume == "never":
            raise ValueError(f"out: {folder.path} is not empty and checkpoint.resume is never; choose another folder")
        _require_same_run(folder.path, values)
    newest_first = checkpoints(folder.checkpoints)[::-1]
    return newest_first if resume in ("auto", "never") else _named_checkpoint(Path(resume), newest_first)


def open_checkpoint(
    folder: RunFolder,
    paths: Sequence[Path],
    ranks: Ranks,
    identity: RunIdentity,
    *,
    fallback: bool = False,
    base: str | None = None,
) -> IntactCheckpoint | None:
    """Verify and return the checkpoint from which the run resumes, or return None for a new run. A collective of all
    ranks.

    paths: on rank 0, the result of `candidates` after the folder was locked; ignored on other ranks
    fallback: whether a damaged checkpoint is renamed and the previous one is used (`checkpoint.fallback`)
    base: the name of the base model of the student's adapter

    Raises DamagedCheckpointError if the checkpoint is damaged and no older one may be used. Raises ValueError if the
    configuration, data, models or log have changed since this run wrote the checkpoint. A checkpoint of another run
    is not compared with them; if its adapter was trained on another base model, a warning is printed.
    """
    paths = [Path(name) for name in ranks.from_first([str(path) for path in paths])]
    damaged: dict[Path, DamagedCheckpointError] = {}
    for number, path in enumerate(paths, start=1):
        is_of_run = folder.owns(path)
        try:
            checkpoint = verified(path, ranks, shared=is_of_run)
        except DamagedCheckpointError as error:
            older = paths[number] if number < len(paths) else None
            if older is not None and fallback:
                damaged[path] = error
                continue
            remedy = "there is no earlier checkpoint: choose another folder as out to start again"
            if not is_of_run:
                remedy = "name another checkpoint as checkpoint.resume"
            elif older is not None:
                remedy = (
                    f"with checkpoint.fallback=true the run continues from {older.name}, the checkpoint before it"
                )
            raise DamagedCheckpointError(f"{error}; {remedy}") from error
        before = checkpoint.state.progress
        if is_of_run:
            require_unchanged_sources(path, before, identity)
            if is_first() and before.saved_log(folder.metrics) is None:
                raise ValueError(
                    f"{folder.metrics} is damaged: its first {before.log_bytes:,} bytes are not those that were "
                    f"there when {path} was written; restore it, or continue in another folder with "
                    f"checkpoint.resume={path}"
                )
        elif base is not None and "student" in _changed(before.models, identity.models):
            log_rank0(f"warning: the adapter in {path} was trained on another base model than {base}")
        for damaged_path, problem in damaged.items() if is_first() else ():
            renamed = set_aside(damaged_path)
            log_rank0(f"warning: {problem}; it was renamed to {renamed}, and the run continues from {path}")
        return checkpoint
    return None


def require_unchanged_sources(path: Path, before: Progress, identity: RunIdentity) -> None:
    """Raise ValueError if the configuration, documents or models have changed since the run began."""
    if before.configuration != identity.configuration:
        raise ValueError(
            f"the configuration has changed since {path} was written: config.yaml in out was edited; restore it, or "
            "choose another folder as out"
        )
    order_before, order = (data.get(ORDER, "packed") for data in (before.data, identity.data))
    if order_before != order:
        raise ValueError(
            f"data.packing: this run has ordered its documents for '{order_before}', and would now order them for "
            f"'{order}': expected data.packing={order_before}, if the models allow it, or another folder as out"
        )
    if (vectors := identity.data.get(DECAY)) != before.data.get(DECAY):
        raise ValueError(
            f"train.weight_decay: {path} was written by a version that applied weight decay to other weights (this "
            f"version does not apply it to {vectors or 'vectors'}): choose another folder as out, with this "
            "checkpoint as checkpoint.resume or, if train.optimizer is muon, with its export as student.model"
        )
    processors, processors_before = (
        {name: digest for name, digest in data.items() if name.startswith(PROCESSOR)}
        for data in (identity.data, before.data)
    )
    since, or_else = f"since {path} was written; restore", "or choose another folder as out"
    changed = sorted(dict(processors.items() ^ processors_before.items()))
    if changed and processors and processors_before:  # earlier versions did not write these keys
        sections = " and ".join(f"{name.removeprefix(PROCESSOR)}.model" for name in changed)
        raise ValueError(f"{sections}: the files of the processor of {MEDIA} have changed {since} them, {or_else}")
    documents = {name: digest for name, digest in identity.data.items() if name not in processors}
    if changed := [f"data.{split}" for split in _changed(before.data, documents)]:
        raise ValueError(f"{' and '.join(changed)}: the documents have changed {since} them, {or_else}")
    models = dict(identity.models)
    for name, words in COMPLETION_KEYS.items():
        now = models.pop(name, None)
        if None not in (was := before.models.get(name), now) and was != now:
            values = f" from {was} to {now}" if max(len(str(was)), len(str(now))) < SHORT else ""
            raise ValueError(f"{words}: changed{values} {since} the files, {or_else}")
    if changed := _changed(before.models, models):
        raise ValueError(f"{' and '.join(changed)}: the files have changed {since} them, {or_else}")


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name, source_hash in now.items() if before.get(name) != source_hash]


def _require_same_run(folder: Path, values: Mapping[str, Any]) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"out: {folder} contains other files and no run; choose an empty or a new folder")
    try:
        before = dotted_values(load_config(path))
    except ConfigError as error:
        raise ValueError(
            f"out: {folder} does not contain a run of this version of stillhouse: {path} cannot be read as a "
            f"configuration ({first_line(error)}); choose an empty or a new folder, and set checkpoint.resume to a "
            "checkpoint in the old folder to train on from its weights"
        ) from error
    there, here = _with_items(decisive_values(before)), _with_items(decisive_values(values))
    different = list[str]()
    for key in {**there, **here}:
        if there.get(key) != here.get(key):
            texts = [json.dumps(side.get(key)) for side in (there, here)]
            different.append(
                key if max(map(len, texts)) > SHORT else f"{key} ({texts[0]} in the folder, now {texts[1]})"
            )
    if different:
        raise ValueError(
            f"out: {folder} contains another run, with a different {', '.join(different)}; choose another folder, "
            "or use the same configuration to continue that run. To begin with its weights, choose another folder as "
            "out, and set checkpoint.resume to one of its checkpoints"
        )


def _with_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with a separate key for each value in a list of sections, such as data.train[1].weight."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and "[" in key:
            items |= _with_items({f"{key}.{name}": inner for name, inner in value.items()})
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            items |= _with_items({f"{key}[{number}]": item for number, item in enumerate(value)})
        else:
            items[key] = value
    return items


def _named_checkpoint(path: Path, newest_first: list[Path]) -> list[Path]:
    """Return the checkpoints from which the run may resume if `checkpoint.resume` is `path`.

    For a new run, this is only the checkpoint at `path`. If `path` is the run's newest checkpoint, or if the run
    started from `path`, all checkpoints of the run are returned. state.json has the path of the checkpoint from which
    the run started.
    """
    newest, start = next(iter(newest_first), None), None
    for readable in newest_first:
        with suppress(DamagedCheckpointError):  # `open_checkpoint` reports the damage
            start = read_state(readable).progress.started_from
            break
    if newest is not None and path.resolve() in (newest.resolve(), None if start is None else Path(start)):
        return newest_first
    if not (path / STATE).is_file():
        raise ConfigError(
            "checkpoint.resume",
            f"{path} is not a checkpoint; expected auto, never or <run>/checkpoints/step-<number>",
        )
    if newest is None:
        return [path]
    raise ConfigError(
        "checkpoint.resume",
        f"got {path}, but out already contains this run's own checkpoint {newest}; checkpoint.resume=auto continues "
        "from the run's own checkpoint, and a run with a new folder as out starts from the checkpoint that you named",
    )


class _Writer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    #: the most likely token after each of a few prompts, and its log-probability; the key in the file is `likeliest`
    top_tokens: list[tuple[int, float]] = Field(alias="likeliest")


def require_same_writer(engine: RemoteEngine, folder: RunFolder) -> None:
    """In a new run, save the servers' answers. In a resumed run, raise ValueError if their weights have changed."""
    path, now = folder.path / WRITER, _Writer(likeliest=[*engine.weights.top_tokens])
    if not path.exists():
        _require_new_run(folder, path, "the servers have the same weights")
        folder.write_json(WRITER, now.model_dump(by_alias=True))
        return
    try:
        before = _Writer.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged: restore it, or choose another folder as out") from error
    if not same_weights(before.top_tokens, now.top_tokens):
        raise ValueError(
            "rollout.url: the servers have other weights than when this run began: expected the same model, or "
            "another folder as out"
        )


def _require_new_run(folder: RunFolder, path: Path, what: str) -> None:
    if any(folder.checkpoints.glob("step-*")):
        raise ValueError(
            f"{path} is missing, so it cannot be checked whether {what}: restore it, or choose another folder as out"
        )


def require_same_teachers(stores: Mapping[str, SignalStore], folder: RunFolder, ranks: Ranks) -> None:
    """In a new run, save the answers of served teachers. In a resumed run, raise ValueError on all ranks if a served
    teacher gives other answers.
    """
    for section, store in stores.items():
        if store.proof is None:
            continue
        with ranks.all_raise(ValueError):
            if not ranks.is_first:
                continue
            _, dot, name = section.partition(".")
            path = folder.path / f"{SERVED_TEACHER}{dot}{name}.safetensors"
            if path.exists():
                store.proof.compare(path)
                continue
            _require_new_run(folder, path, "the teacher is still the same")
            partial = path.with_name(path.name + UNFINISHED)
            with explained_write_errors(path):
                store.proof.save(partial)
                flush(partial)
                partial.rename(path)
