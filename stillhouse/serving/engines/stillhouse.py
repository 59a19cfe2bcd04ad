"""`stillhouse serve --generate`: completions in vLLM's form, and weights from a published folder in one request."""

from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from stillhouse.data import tokenizer_fingerprint
from stillhouse.serving.engines.api import (
    Ask,
    Kind,
    Published,
    require,
)
from stillhouse.serving.engines.vllm import VllmApi


class StillhouseApi(VllmApi):
    """It loads a version whole or not at all, between two batches: every token of a completion has one version."""

    name: ClassVar[str] = "stillhouse"
    proved: ClassVar[bool] = True
    hint: ClassVar[str] = "expected a server that was started with stillhouse serve MODEL --generate"

    def model_name(self, ask: Ask) -> str | None:
        return None

    def give(self, ask: Ask, published: Published) -> bool:
        if published.kind == "adapter":
            raise ValueError(
                "stillhouse serve takes whole models, and the student is an adapter: expected the engine vllm or "
                "transformers"
            )
        body = {"folder": str(published.folder), "version": published.label, "manifest": published.manifest}
        require(ask("/v1/weights", body), "loading the weights", self.hint)
        return True

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        found = require(ask("/v1/info", None), "/v1/info", self.hint)
        is_same = isinstance(found, dict) and found.get("tokenizer") == tokenizer_fingerprint(tokenizer)
        return None if is_same else "its fingerprint is another one"

    def forget(self, ask: Ask, label: str, kind: Kind) -> None:
        pass
