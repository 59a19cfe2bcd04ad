"""The kinds of servers that provide a teacher's signals or generate completions, as one table; no torch import.

A new kind needs an entry here, and a file in `serving/client/apis/` with the class that `api` names.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class ServerKind:
    """The features of a kind of server, and texts for messages about it.

    api: the `ServerApi` in `serving/client/apis/`, as module:class. title: the name of the kind in messages.
    signals: the kinds of signals that the server can provide.
    any_temperature: whether log-probabilities can be requested at any temperature, not only at 1.
    counts_next: whether the server's token limit includes a generated token; a document must then be a token shorter.
    generates: whether the server generates completions. hint: for messages if it does not.
    after_temperature: for messages, a server of this kind whose log-probabilities are computed after the temperature.
        "": this is true for every server of this kind, and its log-probabilities are over the whole vocabulary.
    over_all_tokens: for messages, a server whose log-probabilities at temperature 1 are over all tokens; may be "".
    rounds_as_here: whether float32 log-probabilities differ from those of this process only by float32 rounding.
    reads_images: whether the pixels of the run's own processor can be sent to it.
    tells_tokenizer: whether the server's tokenizer can be compared with the student's.
    """

    name: str
    title: str
    api: str
    signals: tuple[str, ...] = ()
    any_temperature: bool = False
    counts_next: bool = True
    generates: bool = True
    hint: str = ""
    after_temperature: str = ""
    over_all_tokens: str = ""
    rounds_as_here: bool = False
    reads_images: bool = False
    tells_tokenizer: bool = True


_KINDS = (
    ServerKind(
        "stillhouse",
        "`stillhouse serve`",
        "stillhouse:StillhouseApi",
        signals=("hidden", "top_k", "chosen", "sampled"),
        any_temperature=True,
        counts_next=False,
        hint="expected a server that was started with stillhouse serve MODEL --generate",
        rounds_as_here=True,
        reads_images=True,
    ),
    ServerKind(
        "vllm",
        "vLLM",
        "vllm:VllmApi",
        signals=("hidden", "top_k", "chosen"),
        hint="expected vLLM 0.30 or later, started with --enable-scale-out",
        after_temperature="a vLLM that was started with --logprobs-mode processed_logprobs",
        over_all_tokens="a vLLM that was started without --logprobs-mode processed_logprobs",
    ),
    ServerKind(
        "sglang",
        "SGLang",
        "sglang:SglangApi",
        signals=("hidden", "top_k"),
        hint="expected SGLang 0.5 or later",
        after_temperature="an SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
        tells_tokenizer=False,
    ),
)
SERVERS = {kind.name: kind for kind in _KINDS}
#: the engines that generate completions: the student in the job, or servers
ENGINES = ("transformers", *(kind.name for kind in _KINDS if kind.generates))

if TYPE_CHECKING:
    ApiName = str
    EngineName = str
else:
    ApiName = Literal["auto", *(kind.name for kind in _KINDS if kind.signals)]
    EngineName = Literal[ENGINES]
