"""That the servers which write completions with weights of their own are those that the run began with."""

from pydantic import BaseModel, ConfigDict, ValidationError

from stillhouse.output.folder import RunFolder
from stillhouse.serving.client.engine_proof import same_weights
from stillhouse.serving.client.served_engine import ServedEngine

FILE = "writer.json"


class _Writer(BaseModel):
    """likeliest: the tokens after a few prompts, with their log-probabilities (see `engine_proof.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    likeliest: list[tuple[int, float]]


def require_same_writer(engine: ServedEngine, folder: RunFolder) -> None:
    """Write down what the servers' weights are known by. Raises ValueError if a run that goes on finds others."""
    path, now = folder.path / FILE, _Writer(likeliest=engine.weights.top_tokens)
    if not path.exists():
        if any(folder.checkpoints.glob("step-*")):
            raise ValueError(f"{path} is missing: whether the servers have the same weights cannot be checked")
        folder.write_json(FILE, now.model_dump())
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
