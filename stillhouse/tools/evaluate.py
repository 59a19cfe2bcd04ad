"""`stillhouse evaluate`: the held-out metrics of models, computed by the code that computes those of a run.

A model is evaluated as the student of a run that takes no step. So its figures are those that a run with the same
configuration logs for the same weights.
"""

import json
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stillhouse.config import RunConfig, as_config_error
from stillhouse.data import DataReport, LoadOptions, load_documents, load_tokenizer
from stillhouse.data.render.tokenizers import tokenizer_fingerprint
from stillhouse.display import escaped
from stillhouse.loops.greedy_evaluation import greedy_evaluation
from stillhouse.loops.held_out import held_out_metrics
from stillhouse.objective import forward_kl, reverse_kl
from stillhouse.output.disk import replace_text
from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import without_infinity
from stillhouse.run import preflight
from stillhouse.run.data import OVERLAP, load_run_data
from stillhouse.run.run import prepare

#: the metrics of the table, with the headings of their columns
COLUMNS = {
    "eval/cross_entropy": "cross-entropy",
    "eval/perplexity": "perplexity",
    "eval/forward_kl": "forward KL",
    "eval/reverse_kl": "reverse KL",
    "eval/agreement": "agreement",
    "eval/prompts/reward": "reward",
    "eval/prompts/ended": "ended",
}


@dataclass(frozen=True)
class Evaluation:
    """The result of one model.

    config: the configuration of the evaluation.
    metrics: the metrics under their names in metrics.jsonl, and eval/perplexity.
    report: the counts of the held-out data. prompts: the number of completions for the reward, 0 without a reward.
    """

    config: RunConfig
    metrics: dict[str, float]
    report: DataReport
    warnings: list[str]
    prompts: int
    precision: str


def require_comparable(configs: Mapping[str, RunConfig]) -> None:
    """Read the tokenizers of all models and, if the models render the data differently, the data.

    configs: the configurations, by the names of the models as given by the user.

    Raises ValueError if the models' metrics could not be compared, because their targets differ, and ConfigError for
    data without prompts in an evaluation with a reward. Loads no model.
    """
    tokenizers = {}
    for name, config in configs.items():
        with as_config_error("student.model"):
            tokenizers[name] = load_tokenizer(
                config.student.model, config.student.revision, config.student.trust_remote_code
            )
    (first, tokenizer), *others = tokenizers.items()
    config = configs[first]
    for name, other in others:
        if tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer):
            raise ValueError(
                f"{first} and {name} have different tokenizers, so their values per token cannot be compared: "
                "evaluate them by separate commands"
            )
        rendered = [(part.chat_template, part.eos_token) for part in (tokenizer, other)]
        if rendered[0] != rendered[1]:
            hashes = [load_run_data(configs[model], {}).hashes["eval"] for model in (first, name)]
            if hashes[0] != hashes[1]:
                raise ValueError(
                    f"{first} and {name} have different chat templates or end-of-sequence tokens, and so different "
                    "targets in this data: expected the same template for both (data.chat_template), or separate "
                    "commands"
                )
    if (prompts := config.eval.prompts) is not None:
        options = LoadOptions(config.data.max_tokens - prompts.max_new_tokens, prompts=True)
        with as_config_error("eval.prompts.data"):
            load_documents(prompts.data, tokenizer, options)


def evaluate_model(config: RunConfig) -> Evaluation:
    """Evaluate the student of a configuration on data.eval and, if the configuration has them, on eval.prompts.

    Raises the errors of `prepare`, and those of a reward.
    """
    with closing(prepare(config, announce=False)) as session, TemporaryDirectory() as scratch:
        models, sequences = session.models, session.data.evaluation
        assert sequences is not None
        both = forward_kl() + reverse_kl() if models.has_exact_teacher else None
        tokens, spec = session.schedule.held_out_tokens, session.loss.spec
        metrics = held_out_metrics(models, sequences, spec, tokens, with_teacher=True, divergence=both)
        entropy = metrics["eval/cross_entropy"]
        metrics["eval/perplexity"] = math.exp(entropy) if entropy < 700 else math.inf
        prompts = 0
        with greedy_evaluation(session, RunFolder(Path(scratch)), kept=0) as greedy:
            if greedy is not None:
                metrics |= greedy.evaluate(0, metrics)
                prompts = 0 if greedy.prompts is None else greedy.prompts.count
        # data.train is the held-out data, too, so all of its documents overlap
        warnings = [line for line in session.data.warnings if not line.endswith(OVERLAP)]
        decoders = {"student": models.student, **models.teachers}
        warnings += preflight.check_models(decoders, models.teacher_configs, session.data, config.data.max_tokens)
        report, precision = sequences.documents.report, session.schedule.train_config.precision
        return Evaluation(config, metrics, report, [*dict.fromkeys(warnings)], prompts, precision)


def limits_in_words(evaluation: Evaluation) -> list[str]:
    """Return the lines about the limits of the data: which texts are split or cut, and how many prompts are used."""
    config = evaluation.config
    limit = f"data.max_tokens={config.data.max_tokens:,}"
    lines = [
        f"data: {evaluation.report.summary()}",
        f"limits: a text above {limit} is split into documents ({evaluation.report.split_documents:,} were); a "
        f"longer conversation or completion is cut at its end ({evaluation.report.cut_documents:,} were); matrix "
        f"products in {evaluation.precision} (train.precision)",
    ]
    if (prompts := config.eval.prompts) is not None:
        lines.append(
            f"reward: greedy completions of {evaluation.prompts:,} prompts (eval.prompts.count={prompts.count:,}), "
            f"each of at most eval.prompts.max_new_tokens={prompts.max_new_tokens:,} tokens"
        )
    return lines


def table(results: Mapping[str, Evaluation]) -> list[str]:
    """Return the lines of a table with a row for each model. A value in nats is a mean per target token."""
    columns = {key: title for key, title in COLUMNS.items() if any(key in row.metrics for row in results.values())}
    width = max(len(escaped(name)) for name in ("model", *results))
    lines = [f"{'model':{width}}" + "".join(f"  {title:>13}" for title in columns.values())]
    for name, row in results.items():
        values = (row.metrics.get(key, math.nan) for key in columns)
        lines.append(f"{escaped(name):{width}}" + "".join(f"  {value:>13.5g}" for value in values))
    return lines


def write_results(out: Path, results: Mapping[str, Evaluation]) -> None:
    """Write a JSON file with the settings, the counts of the data and all metrics. An infinite metric is null."""
    first = next(iter(results.values()))
    config = first.config
    content: dict[str, Any] = {
        "data": asdict(first.report),
        "settings": {
            "data": config.data.eval,
            "max_tokens": config.data.max_tokens,
            "tokens": config.objective.tokens,
            "teacher": None if config.teacher is None else config.teacher.model,
            "precision": first.precision,
            "seed": config.seed,
            "prompts": None if config.eval.prompts is None else config.eval.prompts.model_dump(),
        },
        "results": {name: without_infinity(row.metrics) for name, row in results.items()},
    }
    replace_text(out, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
