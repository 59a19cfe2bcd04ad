"""What a kind of source of a teacher's signals is, in one place.

The kinds are keys of a teacher's section, of which one says where the signals come from (`teacher.url`). The
rules between keys and the questions of a run, a check and a cache follow from this table.
"""

from dataclasses import dataclass

#: the keys of a teacher's section that are about weights and layers in this job
OF_WEIGHTS = ("parallel", "attention", "revision", "trust_remote_code", "dtype", "quantize", "offload")


@dataclass(frozen=True)
class SourceKind:
    """What a kind of source is. The defaults are those of a store with signals of the data alone.

    key: of a teacher's section. title: the source in words; {} is the value of the key.
    made_by: what makes it, as module:name; a store as `open_cache`, a source in this job as `TeacherSources.model`.
    is_store: whether the signals come from a store, and no other source is made in this job.
    proved_by: what compares a store with the teacher that is meant, as `prove_servers`; "": nothing.
    needs_model: whether it is a use of `teacher.model`, which runs in this job and is given, too.
    beside: the keys that may be given, too, of `OF_WEIGHTS` and `model`. because: why the others have no effect.
    options: the keys that have an effect only with it; with `signal`, the signal is chosen when it is requested.
    any_tokens: whether it has signals of other tokens than the data: of completions, and behind a prefix.
    compares_tokenizer: whether a run refuses a teacher whose tokenizer is not the student's.
    is_address: whether the value may be another one when a run is resumed.
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
        options=("api", "signal", "timeout", "prove", "prove_every", "accept", "top_k"),
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
