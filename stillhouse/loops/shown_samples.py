"""The completions of a step that samples.jsonl shows: each token with its divergence and its version."""

from collections.abc import Sequence

import torch

from stillhouse.engine.engine import StepOutput
from stillhouse.generation import Sample
from stillhouse.output.rollout_log import SAMPLES, SampleToken
from stillhouse.output.rollout_log import Sample as ShownSample
from stillhouse.parallel import ShardedMicroBatches
from stillhouse.run.session import Session

#: how the keys of per-token values begin that are no divergence of teacher and student
_NO_DIVERGENCES = ("log_ratio", "cross_entropy", "entropy", "policy_gradient", "sampled_")


def shown_samples(
    session: Session, step: int, samples: Sequence[Sample], micro_batches: ShardedMicroBatches, output: StepOutput
) -> list[ShownSample]:
    """Some samples of a step, of different prompts if there are enough. A collective of all processes."""
    shown = {number: samples[number] for number in range(0, len(samples), max(1, len(samples) // SAMPLES))}
    divergences = _divergences(session, list(shown), micro_batches, output)
    return [_shown(session, step, sample, divergences, number) for number, sample in shown.items()]


def _divergences(
    session: Session, numbers: list[int], micro_batches: ShardedMicroBatches, output: StepOutput
) -> dict[tuple[int, int], float]:
    """The divergence of the distributions that predicted a token, by its document and its position there.

    numbers: of the documents in the step; samples are numbered as `step_documents` does.
    """
    own: list[tuple[int, int, float]] = []
    for micro_batch, of_micro_batch in zip(micro_batches, output.outputs, strict=False):
        divergences = [
            value_T for name, value_T in of_micro_batch.per_token.items() if not name.startswith(_NO_DIVERGENCES)
        ]
        if not divergences:
            continue
        documents_T = micro_batch.document_T
        is_shown_T = torch.isin(documents_T, torch.tensor(numbers, device=documents_T.device))
        is_shown_T &= micro_batch.weights_T > 0
        rows = is_shown_T.nonzero()[:, 0]
        documents = micro_batch.document_T[rows].tolist()
        positions = (micro_batch.position_ids_BS.flatten()[rows] + 1).tolist()
        own += zip(documents, positions, torch.stack(divergences).sum(0)[rows].tolist(), strict=True)
    everyone = session.ranks.gather(own)
    return {(document, position): value for of_rank in everyone for document, position, value in of_rank}


def _shown(
    session: Session, step: int, sample: Sample, divergences: dict[tuple[int, int], float], number: int
) -> ShownSample:
    assert session.config.rollout is not None
    completion, tokenizer = sample.completion, session.tokenizer
    prompt_ids = session.train.documents.tokens(sample.prompt)
    by_student = session.config.rollout.writer == "student"
    tokens = []
    for at, (token, version) in enumerate(
        zip(completion.ids_N.tolist(), completion.versions_N.tolist(), strict=True)
    ):
        divergence = divergences.get((number, len(prompt_ids) + at))
        is_written = bool(sample.is_written_N[at])
        tokens.append(
            SampleToken(
                text=tokenizer.decode([token]),
                divergence=divergence,
                version=version if is_written and by_student else None,
                target=is_written,
            )
        )
    oldest = int(completion.versions_N[sample.is_written_N].min())
    return ShownSample(
        prompt=tokenizer.decode(prompt_ids),
        completion=tokenizer.decode(completion.ids_N),
        tokens=tokens,
        reward=sample.reward,
        advantage=None if sample.reward is None else sample.advantage,
        finish=completion.finish,
        source="student" if by_student else "teacher",
        staleness=step - oldest if by_student else 0,
    )
