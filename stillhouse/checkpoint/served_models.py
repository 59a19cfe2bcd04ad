"""Proves that the servers of a resumed run have the same models as at the beginning of the run."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from stillhouse.output.disk import UNFINISHED, explained_write_errors, flush
from stillhouse.output.folder import RunFolder
from stillhouse.parallel import Ranks
from stillhouse.rollout.engines import RemoteEngine, same_weights
from stillhouse.signals import SignalStore
from stillhouse.signals.signal_store import StoreProof

#: a file with this prefix has the answers of a teacher's servers at the beginning of the run
SERVED_TEACHER = "served_teacher"
#: the file with the answers of servers that generate completions with weights that the run does not replace
WRITER = "writer.json"


class _Writer(BaseModel):
    """likeliest: the most likely token after each of a few prompts, and its log-probability (`engine_proof.py`)"""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    likeliest: list[tuple[int, float]]


def require_same_writer(engine: RemoteEngine, folder: RunFolder) -> None:
    """Save the servers' answers in a new run; in a resumed run, raise ValueError if the weights differ."""
    path, now = folder.path / WRITER, _Writer(likeliest=[*engine.weights.top_tokens])
    if not path.exists():
        if any(folder.checkpoints.glob("step-*")):
            raise ValueError(f"{path} is missing: whether the servers have the same weights cannot be checked")
        folder.write_json(WRITER, now.model_dump())
        return
    try:
        before = _Writer.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged: restore it, or choose another folder as out") from error
    if not same_weights(before.likeliest, now.likeliest):
        raise ValueError(
            "rollout.url: the servers have other weights than when this run began: expected the same model, or "
            "another folder as out"
        )


def require_same_teachers(stores: Mapping[str, SignalStore], folder: RunFolder, ranks: Ranks) -> None:
    """Raise ValueError on all ranks if a served teacher now gives other answers than at the run's beginning."""
    for section, store in stores.items():
        if store.proof is not None:
            with ranks.all_raise(ValueError):
                if ranks.is_first:
                    _, dot, name = section.partition(".")
                    _require_same(folder, store.proof, f"{SERVED_TEACHER}{dot}{name}.safetensors")


def _require_same(folder: RunFolder, proof: StoreProof, name: str) -> None:
    """In a new run, save a served teacher's answers. In a resumed run, compare them with the saved answers."""
    path = folder.path / name
    if path.exists():
        proof.compare(path)
    elif any(folder.checkpoints.glob("step-*")):
        raise ValueError(f"{path} is missing: whether the teacher is still the same cannot be checked")
    else:
        partial = path.with_name(path.name + UNFINISHED)
        with explained_write_errors(path):
            proof.save(partial)
            flush(partial)
            partial.rename(path)
