"""The kinds of sources of a teacher's signals, as one table.

Each kind is a key of a teacher's section, such as `teacher.url`. The rules between keys follow from this table.
"""

from dataclasses import dataclass

#: the keys of a teacher's section that concern weights and layers in this job
OF_WEIGHTS = ("parallel", "attention", "revision", "trust_remote_code", "dtype", "quantize", "offload")


@dataclass(frozen=True)
class SourceKind:
    """The properties of a kind of source. The defaults are those of a store with signals only for the data.

    key: the key in a teacher's section. title: the source in words; {} is replaced by the value of the key.
    made_by: the function or class that makes the source, as module:name. For a store, its arguments are those of
        `open_cache`, otherwise those of `TeacherSources.model`.
    is_store: whether the source is a `SignalStore`.
    proved_by: the function that compares a store with the expected teacher, such as `prove_servers`; "" for none.
    needs_model: whether the source runs `teacher.model` in this job, so that this key must be set, too.
    beside: which of `OF_WEIGHTS` and `model` may be set, too. because: why the other keys have no effect.
    options: the keys that have an effect only with this source; with `signal`, the user chooses the kind of signal.
    any_tokens: whether there are signals for tokens outside the data: for completions, and after a prefix.
    compares_tokenizer: whether a run refuses a teacher whose tokenizer is not the student's.
    is_address: whether the value of the key may change when a run is resumed.
    """

    key: str
    title: str
    made_by: str
    is_store: bool = True
    proved_by: str = ""
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


_KINDS = (
    SourceKind(
        "model",
        "{}",
        "stillhouse.run.teacher_sources:TeacherSources.model",
        is_store=False,
        beside=OF_WEIGHTS,
        any_tokens=True,
        compares_tokenizer=True,
    ),
    SourceKind(
        "url",
        "on a server",
        "stillhouse.run.stores:open_servers",
        proved_by="stillhouse.run.stores:prove_servers",
        beside=("model", "attention", "revision", "dtype"),
        options=("token_variable", "api", "signal", "timeout", "prove", "prove_every", "accept", "top_k"),
        any_tokens=True,
        compares_tokenizer=True,
        is_address=True,
    ),
    SourceKind(
        "student",
        "the student itself",
        "stillhouse.run.teacher_sources:TeacherSources.self_teacher",
        is_store=False,
        because="the student's own is used",
        options=("ema_decay",),
        any_tokens=True,
        compares_tokenizer=True,
    ),
    SourceKind(
        "cache",
        "cache {}",
        "stillhouse.run.stores:open_cache",
        beside=("attention", "revision", "trust_remote_code", "dtype"),
        compares_tokenizer=True,
    ),
    SourceKind(
        "cross_tokenizer",
        "{}",
        "stillhouse.run.stores:open_cross_tokenizer",
        needs_model=True,
        beside=OF_WEIGHTS,
        options=("top_k",),
        any_tokens=True,
    ),
)
SOURCES = {kind.key: kind for kind in _KINDS}
