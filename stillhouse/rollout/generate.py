"""Generates completions in this process, with transformers' own `generate` and the student's present weights.

The model's `generation_config` has no effect on the generation; the caller reads the end-of-sequence ids from it
(`Sampling.eos_ids`). Dimensions: B completions, S tokens of the longest prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from stillhouse.data.media import MEDIA, MediaProcessor
from stillhouse.libraries import reading
from stillhouse.models import Decoder, NotFiniteError, check_document_length, evaluating
from stillhouse.models.families import ModelFacts, placeholder_ids
from stillhouse.models.model_checks import typename
from stillhouse.models.vision_language import MEDIA_ARGUMENT
from stillhouse.parallel import watchdog
from stillhouse.rollout.records import Completion, CompletionCallback, GenerationRequest, Sampling
from stillhouse.rollout.sampler import EndOfCompletion, TokenSampler

# the largest allowed difference between log-probabilities with and without the cache, in nats. It is not 0, because
# the two forward passes multiply matrices of different shapes
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


class Generator:
    """Generates completions with a decoder.

    autocast: the dtype of matrix products, or None for the dtype of the weights.
    batch_tokens: the maximum number of tokens of a batch (prompts, padding and completions). Only a batch of a single
        request can have more.
    vocabulary: only ids below this number are sampled, because the tokenizer has no larger ids. The default is
        `counted_rows`.
    counted_rows: the number of rows of the head over which log-probabilities are normalised, or None for all rows.
    tokenizer: needed only for `sampling.stop`.
    processor: needed only for prompts with media.

    Raises ValueError if the model cannot generate, or if there are stop texts but no tokenizer.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling,
        device: torch.device,
        autocast: torch.dtype | None = None,
        batch_tokens: int = 16384,
        *,
        vocabulary: int | None = None,
        counted_rows: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: MediaProcessor | None = None,
    ):
        if not decoder.pretrained.can_generate():
            raise ValueError(f"{typename(decoder.pretrained)} has no generate(): expected a causal language model")
        if sampling.stop and tokenizer is None:
            raise ValueError("stop texts need the tokenizer: expected Generator(..., tokenizer=...)")
        self.decoder, self.sampling, self.device = decoder, sampling, device
        self._name = typename(decoder.pretrained)
        # with row windows, attention depends on a token's column in its row, which padding on the left changes
        self._equal_lengths = bool(ModelFacts(decoder.config).row_windows)
        self._autocast, self.batch_tokens, self._tokenizer = autocast, batch_tokens, tokenizer
        self._processor = processor
        #: the placeholder ids of media. A completion must not contain them, because they would have no features
        self.never: list[int] = []
        if processor is not None:
            self.never = sorted({*processor.placeholder_ids, *placeholder_ids(decoder.pretrained)})
        rows = decoder.vocabulary_rows
        self._counted = rows if counted_rows is None else min(counted_rows, rows)
        self._vocabulary = self._counted if vocabulary is None else min(vocabulary, self._counted)

    def generate(
        self, requests: Sequence[GenerationRequest], version: int, early: CompletionCallback | None = None
    ) -> list[Completion]:
        """Return one completion per request, in the order of the requests.

        Except for rounding, a completion depends on its own request alone.

        version: the version of the present weights, which is recorded for each token.
        early: called with each completion as soon as this completion ends, while the model still generates other
            completions of the batch.

        Raises the ValueError of `check`, and NotFiniteError, which is a ValueError, if logits are not finite.
        """
        self.check(requests)
        completions_by_number: dict[int, Completion] = {}
        for batch in self.batches(requests):
            completions = self.batch([requests[at] for at in batch], version, early=early)
            completions_by_number.update(zip(batch, completions, strict=True))
        return [completions_by_number[at] for at in range(len(requests))]

    def batches(self, requests: Sequence[GenerationRequest], least: int = 1) -> list[list[int]]:
        """Divide requests into batches of similar lengths and equal sampling settings. A batch is a list of positions
        in `requests`, with at most len(requests) / least entries (rounded up).

        least: the number of processes that share the batches.
        """
        samplings = [self._sampling(request) for request in requests]
        kinds = list(dict.fromkeys(samplings))
        sizes = [(len(request.prompt_ids), self._limit(request)) for request in requests]
        most_rows = max(1, -(-len(requests) // least))
        batches: list[list[int]] = []
        prompt = limit = 0
        for at in sorted(range(len(requests)), key=lambda at: (kinds.index(samplings[at]), sizes[at], at)):
            # each row of a batch needs (longest prompt of the batch + largest limit of the batch) tokens
            prompt, limit = max(prompt, sizes[at][0]), max(limit, sizes[at][1])
            rows, last = (len(batches[-1]) + 1, batches[-1][0]) if batches else (0, at)
            fits = rows <= most_rows and rows * (prompt + limit) <= self.batch_tokens
            is_alike = samplings[last] == samplings[at]
            if self._equal_lengths:
                is_alike = is_alike and sizes[last][0] == sizes[at][0]
            if batches and fits and is_alike:
                batches[-1].append(at)
            else:
                batches.append([at])
                prompt, limit = sizes[at]
        return batches

    @torch.no_grad()
    def batch(
        self,
        requests: Sequence[GenerationRequest],
        version: int,
        errors: AbstractContextManager[object] = nullcontext(),  # noqa: B008 it has no state
        early: CompletionCallback | None = None,
        streamer: BaseStreamer | None = None,
    ) -> list[Completion]:
        """Return the completions of one batch. The caller must have called `check`.

        early: see `generate`.
        streamer: gets the ids of the prompt and then each generated id, in a batch of a single request.
        errors: a context manager around the call of the model's own `generate`.
        """

        def on_end(rows: Sequence[int]) -> None:
            assert early is not None
            for row, completion in zip(rows, self._completions(sampler, end, version, rows), strict=True):
                early((requests[row].number, completion))

        width = max(len(request.prompt_ids) for request in requests)
        limits = [self._limit(request) for request in requests]
        ids_BS = np.zeros((len(requests), width), dtype=np.int64)
        mask_BS = np.zeros_like(ids_BS)
        for row, request in enumerate(requests):
            ids_BS[row, width - len(request.prompt_ids) :] = request.prompt_ids
            mask_BS[row, width - len(request.prompt_ids) :] = 1
        seeds, sampling = [request.seed for request in requests], self._sampling(requests[0])
        sampler = TokenSampler(sampling, seeds, max(limits), self._vocabulary, self.device, self._counted, self.never)
        media: dict[str, Tensor] = {}  # further arguments of the model's `generate`
        if any(request.has_media for request in requests):
            if self._processor is None:
                raise ValueError(
                    f"prompts with {MEDIA} need the model's processor: expected Generator(..., processor=...)"
                )
            arguments = self._processor.prompt_arguments(self.decoder, requests, width)
            media = {name: value.to(self.device) for name, value in arguments.items()}
        listener = None if early is None else on_end
        end = EndOfCompletion(sampling, limits, width, self._tokenizer, self.device, listener)
        with errors:
            self._run(ids_BS, mask_BS, max(limits), sampler, end, media, streamer)
        return self._completions(sampler, end, version, range(len(requests)))

    def _run(
        self,
        ids_BS: np.ndarray,
        mask_BS: np.ndarray,
        tokens: int,
        sampler: TokenSampler,
        end: EndOfCompletion,
        media: Mapping[str, Tensor],
        streamer: BaseStreamer | None,
    ) -> None:
        """Call the model's `generate`; `sampler` and `end` record the result.

        If a caller of `generate` omits a setting, transformers takes it from the model's `generation_config`, which
        may contain penalties, suppressed tokens and limits. So the model has an empty `generation_config` during the
        call.

        tokens: max_new_tokens.
        """
        watchdog.progress()
        model, dtype = self.decoder.pretrained, self._autocast
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0, disable_compile=True
        )
        usual_attention = self.decoder.packing.attention.without_lengths()
        rounded_once = nullcontext() if dtype is None else _rounded_once(model, self.device, dtype)
        own_settings, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with evaluating(model), usual_attention, rounded_once:
                model.generate(
                    torch.from_numpy(ids_BS).to(self.device),
                    generation_config=settings,
                    attention_mask=torch.from_numpy(mask_BS).to(self.device),
                    past_key_values=roomy_cache(model, ids_BS.shape[1] + tokens),
                    logits_processor=[sampler],
                    stopping_criteria=[end],
                    streamer=streamer,
                    **media,
                )
        finally:
            model.generation_config = own_settings

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise ValueError with the request's number if the model cannot generate a completion for a request."""
        model = self.decoder.pretrained
        rows = model.get_input_embeddings().weight.shape[0]
        for request in requests:
            ids = request.prompt_ids
            if self._sampling(request).stop and self._tokenizer is None:
                raise ValueError("stop texts need the tokenizer: expected Generator(..., tokenizer=...)")
            if len(ids) == 0 or self._limit(request) < 1:
                raise ValueError(
                    f"request {request.number} has {len(ids)} prompt tokens and a limit of {self._limit(request)} "
                    "new tokens: expected at least 1 of each"
                )
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest >= rows:
                raise ValueError(
                    f"request {request.number} has token ids {smallest} to {largest}: expected 0 to {rows - 1}"
                )
        longest = max((len(request.prompt_ids) + self._limit(request) for request in requests), default=0)
        check_document_length(model, longest, self._name)

    def _sampling(self, request: GenerationRequest) -> Sampling:
        return self.sampling if request.sampling is None else request.sampling

    def _limit(self, request: GenerationRequest) -> int:
        most = self._sampling(request).max_new_tokens
        return most if request.max_new_tokens is None else min(most, request.max_new_tokens)

    def _completions(
        self, sampler: TokenSampler, end: EndOfCompletion, version: int, rows: Sequence[int]
    ) -> list[Completion]:
        (ids_BN, log_probs_BN), (lengths, stopped) = sampler.result(), end.result()
        completions = []
        for row in rows:
            ids_N, log_probs_N = (values_BN[row, : lengths[row]].copy() for values_BN in (ids_BN, log_probs_BN))
            if not np.isfinite(log_probs_N).all():
                raise NotFiniteError(
                    f"{self._name}: its logits are not finite when it generates a completion: "
                    "expected finite weights, and a dtype whose range is large enough for the model"
                )
            versions_N = np.full(lengths[row], version, dtype=np.int32)
            completions.append(Completion(ids_N, log_probs_N, versions_N, "stop" if stopped[row] else "length"))
        return completions


@torch.no_grad()
def check_generation(decoder: Decoder, device: torch.device, processor: MediaProcessor | None = None) -> None:
    """Raise ValueError with the model type if the model's `generate` fails or disagrees with the forward pass.

    The log-probabilities of completions of two short prompts of different lengths are compared with the
    log-probabilities of a forward pass without a cache and without padding.

    processor: the processor of the model's media; if it is given, prompts with media are also tested.
    """
    model = decoder.pretrained
    rows = model.get_input_embeddings().weight.shape[0]
    prompts = [(np.arange(tokens, dtype=np.int32) * 37 + 5) % rows for tokens in (3, 8)]
    generator = Generator(decoder, Sampling(max_new_tokens=4, temperature=0.0), device, processor=processor)
    requests = [GenerationRequest(at, ids, 0) for at, ids in enumerate(prompts)]
    cases: list[tuple[str, MediaProcessor | None, list[GenerationRequest]]] = [("its generate()", None, requests)]
    if processor is not None:
        examples = enumerate(processor.example_prompts())
        requests = [GenerationRequest(at, ids, 0, media=files) for at, (ids, files) in examples]
        cases.append((f"its generate() for prompts with {MEDIA}", processor, requests))
    for what, reader, requests in cases:
        completions: dict[int, Completion] = {}
        for batch in generator.batches(requests):
            errors = reading(f"{typename(model)}: {what} fails")
            completions.update(zip(batch, generator.batch([requests[at] for at in batch], 0, errors), strict=True))
        for at, request in enumerate(requests):
            completion, prompt = completions[at], request.prompt_ids
            ids_N = np.concatenate([prompt, completion.ids_N])
            ids, inputs = torch.from_numpy(ids_N.astype(np.int64)).to(device), dict[str, Any]()
            if reader is not None:
                types = reader.token_types(ids_N).items()
                inputs = {name: torch.from_numpy(types_N)[None].to(device) for name, types_N in types}
                tensors = reader.read_files(request.media, prompt).tensors
                inputs[MEDIA_ARGUMENT] = {name: value.to(device) for name, value in tensors.items()}
            with evaluating(decoder):
                logits_SV = decoder(ids[None], **inputs)[0, len(prompt) - 1 : -1]
            expected = logits_SV.float().log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].cpu().numpy()
            error = float(np.median(np.abs(expected - completion.log_probs_N)))
            if not error <= _TOLERANCE[logits_SV.dtype]:
                raise ValueError(
                    f"{typename(model)}: {what} gives log-probabilities that differ by {error:.2g} nats from "
                    "those of its forward pass: expected a model that supports a cache and padding on the left. For "
                    "another model, let a server generate the completions (rollout.engine)"
                )


@contextmanager
def _rounded_once(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Run matrix products in `dtype`, and round each float32 matrix only once in the block instead of once per new
    token.

    Autocast keeps rounded copies only of weights with requires_grad, so the block sets it for frozen weights, too.
    Until the end of the block, the copies need half the memory of the float32 matrices.
    """
    frozen = [weight for weight in model.parameters() if weight.dtype == torch.float32 and not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        with torch.autocast(device.type, dtype, cache_enabled=True):
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


class RoomyLayer(DynamicLayer):
    """A layer of the cache that allocates memory for `tokens` tokens at once. If there are more tokens, it
    concatenates them as transformers' layer does.
    """

    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, tokens: int):
        super().__init__()
        self._tokens = tokens
        self._room: list[Tensor] | None = None

    def update(self, key_BHSW: Tensor, value_BHSW: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.get_seq_length()
        after = before + key_BHSW.shape[-2]
        if after > self._tokens:
            keys_and_values: tuple[Tensor, Tensor] = super().update(key_BHSW, value_BHSW, *args, **kwargs)
            return keys_and_values
        if not self.is_initialized:
            self.lazy_initialization(key_BHSW, value_BHSW)
            shapes = ((new, (*new.shape[:2], self._tokens, new.shape[3])) for new in (key_BHSW, value_BHSW))
            self._room = [torch.empty(shape, dtype=new.dtype, device=new.device) for new, shape in shapes]
        assert self._room is not None
        for room, new in zip(self._room, (key_BHSW, value_BHSW), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self._room)
        return self.keys, self.values

    def reset(self) -> None:
        # the keys are removed here, because `reset` of transformers 5.17 keeps them
        self.keys = self.values = self._room = None
        self.is_initialized = False
        super().reset()


def roomy_cache(model: PreTrainedModel, tokens: int) -> DynamicCache | None:
    """A cache with memory for `tokens` tokens, for one call of `generate`. None if the model needs another kind
    of cache.
    """
    if getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder:
        return None
    cache = DynamicCache(config=model.config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [RoomyLayer(tokens) for _ in cache.layers]
    return cache
