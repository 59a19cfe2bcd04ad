"""The weights of the student that a run has written, and their comparison between two runs."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(run: Path, reference: Path, tolerance: float = 1e-4) -> None:
    """Compare each weight. tolerance: the largest difference, relative to the norm of the reference's weight."""
    values, expected = weights(run), weights(reference)
    assert values.keys() == expected.keys()
    for name, weight in expected.items():
        assert (values[name] - weight).norm() <= tolerance * weight.norm(), name
