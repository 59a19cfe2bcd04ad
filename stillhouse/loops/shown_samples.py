"""The completions of a step that samples.jsonl shows: each token with its divergence and its version."""

from collections.abc import Sequence

import torch

from stillhouse.engine.engine import StepOutput
from stillhouse.generation import Sample as GeneratedSample
from stillhouse.output.records import Sample, SampleToken
from stillhouse.output.rollout_log import SAMPLES
from stillhouse.parallel import ShardedMicroBatches
from stillhouse.run.session import Session

#: how the keys of per-token values begin that are no divergence of teacher and student
_NO_DIVERGENCES = ("log_ratio", "cross_entropy", "entropy", "policy_gradient", "sampled_")


def shown_samples(
    session: Session,
    step: int,
    samples: Sequence[GeneratedSample],
    micro_batches: ShardedMicroBatches,
    output: StepOutput,
) -> list[Sample]:
    """Some samples of a step, of different prompts if there are enough. A collective of all processes."""
    numbers = list(range(0, len(samples), max(1, len(samples) // SAMPLES)))
    divergences = _divergences(session, numbers, micro_batches, output)
    return [_shown(session, step, samples[number], divergences, number) for number in numbers]


def _divergences(
    session: Session, numbers: list[int], micro_batches: ShardedMicroBatches, output: StepOutput
) -> dict[tuple[int, int], float]:
    """The divergence of the distributions that predicted a token, by its document and its position there.

    numbers: of the documents in the step; samples are numbered as `step_documents` does.
    """
    rows_here: list[tuple[int, int, float]] = []
    for micro_batch, processed in zip(micro_batches, output.outputs, strict=False):
        per_token = processed.per_token.items()
        divergences = [value_T for name, value_T in per_token if not name.startswith(_NO_DIVERGENCES)]
        if not divergences:
            continue
        documents_T = micro_batch.document_T
        is_shown_T = torch.isin(documents_T, torch.tensor(numbers, device=documents_T.device))
        is_shown_T &= micro_batch.weights_T > 0
        rows = is_shown_T.nonzero()[:, 0]
        documents = documents_T[rows].tolist()
        positions = (micro_batch.position_ids_BS.flatten()[rows] + 1).tolist()
        rows_here += zip(documents, positions, torch.stack(divergences).sum(0)[rows].tolist(), strict=True)
    all_ranks = session.ranks.gather(rows_here)
    return {(document, position): value for of_rank in all_ranks for document, position, value in of_rank}


def _shown(
    session: Session, step: int, sample: GeneratedSample, divergences: dict[tuple[int, int], float], number: int
) -> Sample:
    assert session.rollout_config is not None
    completion, tokenizer = sample.completion, session.tokenizer
    prompt_ids = session.train.documents.tokens(sample.prompt)
    by_student = session.rollout_config.writer == "student"
    generated = zip(
        completion.ids_N.tolist(), completion.versions_N.tolist(), sample.is_written_N.tolist(), strict=True
    )
    tokens = [
        SampleToken(
            text=tokenizer.decode([token]),
            divergence=divergences.get((number, position)),
            version=version if is_generated and by_student else None,
            target=is_generated,
        )
        for position, (token, version, is_generated) in enumerate(generated, start=len(prompt_ids))
    ]
    oldest = int(completion.versions_N[sample.is_written_N].min())
    return Sample(
        step=step + 1,
        prompt=tokenizer.decode(prompt_ids),
        completion=tokenizer.decode(completion.ids_N),
        tokens=tokens,
        length=len(tokens),
        reward=sample.reward,
        advantage=None if sample.reward is None else sample.advantage,
        finish=completion.finish,
        source="student" if by_student else "teacher",
        staleness=step - oldest if by_student else 0,
    )
