"""The interface of the entries of the group `stillhouse.sources`: kinds of sources for a teacher's signals.

`run/signal_source_kinds.py` has the built-in kinds, except for `url` (`serving/client/server_kinds.py`). A kind is a
key of a teacher's section, such as `teacher.url`, and says which other keys can be combined with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stillhouse.registry import load_all

GROUP = "stillhouse.sources"
#: the keys of a teacher's section about weights and layers in this job
WEIGHT_KEYS = ("parallel", "attention", "revision", "trust_remote_code", "dtype", "quantize", "offload")


@dataclass(frozen=True)
class SourceKind:
    """A kind of source. The defaults fit a store that has signals only for the run's data.

    key: the key in a teacher's section; the entry point has this name. title: the source in words; {} is replaced by
        the value of the key.
    is_store: whether the source is a `SignalStore`, which `open` opens. If not, `source` makes a `SignalSource`.
    needs_model: whether the source runs `teacher.model` in this job, so that this key must be set, too.
    beside: the keys among `WEIGHT_KEYS` and `model` that can be set together with this key. because: the reason why
        all other keys of `WEIGHT_KEYS` have no effect.
    options: the keys that have an effect only with this source. If `signal` is one of them, the user chooses the
        kind of signal.
    any_tokens: whether there are signals for tokens outside the data: for completions, and after a prefix.
    compares_tokenizer: whether a run refuses a teacher with another tokenizer than the student's.
    is_address: whether the value of the key is an address, which may be different when a run is resumed.
    """

    key: str
    title: str
    is_store: bool = True
    needs_model: bool = False
    beside: tuple[str, ...] = ()
    because: str = "no teacher runs in this job"
    options: tuple[str, ...] = ()
    any_tokens: bool = False
    compares_tokenizer: bool = False
    is_address: bool = False

    @property
    def runs_model(self) -> bool:
        """Whether `teacher.model` runs in this job."""
        return self.key == "model" or self.needs_model

    def rules(self) -> Iterable[Any]:
        """Return the rules (`Rule`) for keys of a teacher's section that do not follow from the fields above."""
        return ()

    def require_server(self, section: str, teacher: Any, url: str, seconds: float) -> None:
        """Raise ValueError unless the teacher's server at `url` answers, or is still loading. Needs no torch.

        section: the key of the teacher's section. teacher: the section. seconds: the time limit.
        """

    def open(self, section: str, teacher: Any, objective: Any, batch_tokens: int) -> Any:
        """Open the `SignalStore` of a teacher. Raises ConfigError if the store cannot be used.

        section: the key of the teacher's section. teacher: the section. objective: the `RunObjective`.
        batch_tokens: the maximum number of tokens in a forward pass of a teacher in this job.
        """
        raise NotImplementedError

    def source(self, sources: Any, section: str, teacher: Any, head: Any) -> Any:
        """Make the `SignalSource` of a teacher. sources: the `TeacherSources`. head: the teacher's head; None
        on a process without the student's last stage.
        """
        raise NotImplementedError

    def prove(self, section: str, teacher: Any, store: Any, documents: Any, data: Any, device: Any) -> None:
        """Raise ValueError or OSError unless the store has the signals of the intended teacher.

        documents: the training documents that the teacher scores. data: the `Data` of the run.
        """


def source_kinds() -> dict[str, SourceKind]:
    """Return the registered kinds by key: first `model`, then all others, in the order of increasing restrictions.

    If two kinds exclude each other, the error names the later kind.
    """
    kinds = load_all(GROUP)
    ranked = sorted(
        (key != "model", kind.needs_model, "model" not in kind.beside, not kind.any_tokens, key)
        for key, kind in kinds.items()
    )
    return {key: kinds[key] for *_, key in ranked}
