"""SGLang 0.5: completions from `/generate`, weights by `/update_weights_from_disk`. Written after its source; none of
its answers was recorded.

It labels a completion as a whole, when it ends. So before an update, completions under way are ended, and what was
asked before the update and answered after it is discarded and asked again. Its log-probabilities are those after the
temperature, over the whole vocabulary, unless it was started with SGLANG_RETURN_ORIGINAL_LOGPROB.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import httpx2
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from stillhouse.generation.sample import Sampling
from stillhouse.serving.engines.api import (
    Answer,
    Ask,
    Kind,
    Published,
    Span,
    refuse,
    require,
)

#: log-probability, id, text
_Entry = tuple[float, int, str | None]


class _Finish(BaseModel):
    type: Literal["stop", "length"]
    matched: int | str | None = None


class _Meta(BaseModel):
    finish_reason: _Finish
    output_token_logprobs: list[_Entry]
    output_top_logprobs: list[list[_Entry] | None] = []
    weight_version: str | None = None


class _Generated(BaseModel):
    output_ids: list[int] | None = None
    meta_info: _Meta


class SglangApi:
    name: ClassVar[str] = "sglang"
    path: ClassVar[str] = "/generate"
    marks_tokens: ClassVar[bool] = False
    proved: ClassVar[bool] = False
    hint: ClassVar[str] = "expected SGLang 0.5 or later"

    def model_name(self, ask: Ask) -> str | None:
        return None

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        parameters = {
            "max_new_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": seed % 2**31,
            "ignore_eos": True,
            "stop_token_ids": list(sampling.eos_ids),
            "stop": list(sampling.stop),
            "no_stop_trim": True,
        }
        return {
            "input_ids": list(ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": top,
        }

    def parse(self, response: httpx2.Response, kind: Kind) -> Answer:
        found = _read(response)
        ids = [token for _, token, _ in found.meta_info.output_token_logprobs]
        if found.output_ids is not None and found.output_ids != ids:
            raise ValueError("the ids of the completion and of its log-probabilities differ")
        log_probs = [value for value, _, _ in found.meta_info.output_token_logprobs]
        finish = found.meta_info.finish_reason
        spans = [Span(found.meta_info.weight_version, 0, len(ids))]
        return Answer(ids, log_probs, spans, finish.type, finish.matched if isinstance(finish.matched, str) else None)

    def top_log_probs(self, response: httpx2.Response) -> list[float]:
        rows = _read(response).meta_info.output_top_logprobs
        return sorted({token: value for value, token, _ in (rows[0] if rows else None) or []}.values(), reverse=True)

    def give(self, ask: Ask, published: Published) -> bool:
        if published.kind == "adapter":
            raise ValueError(
                "adapters are not given to SGLang, and the student is an adapter: expected the engine vllm or "
                "transformers"
            )
        require(ask("/pause_generation", {"mode": "abort"}), "/pause_generation", self.hint)
        body = {"model_path": str(published.folder), "weight_version": published.label, "flush_cache": True}
        response = ask("/update_weights_from_disk", body)
        found = require(response, "loading the weights", "the server stays paused")
        if not isinstance(found, dict) or found.get("success") is not True:
            refuse(response, "loading the weights", str(found)[:500], "the server stays paused")
        require(ask("/continue_generation", {}), "/continue_generation")
        return True

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        raise ValueError(
            "SGLang does not tell its tokenizer, so that the ids of a teacher's completions may mean other text: "
            "expected rollout.engine vllm or stillhouse"
        )

    def forget(self, ask: Ask, label: str, kind: Kind) -> None:
        pass


def _read(response: httpx2.Response) -> _Generated:
    try:
        return _Generated.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"/generate gives no completion: {place}: {first['msg']}") from error
