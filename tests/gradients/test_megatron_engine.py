"""Steps of the engine on Megatron-Core equal those of the other engine in one process.

Compared are each step's loss, metrics and gradient norm, held-out metrics, the first step's gradients, and the
weights after two steps with clipping and weight decay. megatron-core is the real one, on a CPU.
"""

import pytest
import torch
from kit import slow
from kit.shard_ranks import Failure, pool_of_meshes

pytest.importorskip("megatron.core")

from kit.megatron_adapter_jobs import without_an_adapters_part
from kit.megatron_engine_jobs import Difference, Job, compare, refused_teacher, reordered
from kit.megatron_precision_jobs import average_apart, distances
from kit.megatron_state_jobs import (
    replicas_apart,
    resumed_in_another_layout,
    saved_and_loaded,
    wrong_partition,
)
from kit.megatron_weights_jobs import Case

from stillhouse.models.adapter import ALL_LINEAR
from stillhouse.models.document_packing import ROWS
from stillhouse.tools.parity import worst

LIMIT = 180.0
RECOMPUTED_EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LATENT_PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
QUICK = [
    Job(Case("qwen3", tied=True, tensor=2)),
    Job(Case("llama", pipeline=2)),
    Job(Case("qwen3", context=2), uneven=True),
]
SLOW = [
    Job(Case("llama", pipeline=2, tied=True), depths=2, uneven=True),
    Job(Case("qwen3", tensor=2, tied=True), adapter=ALL_LINEAR),
    Job(Case("qwen3", tensor=2, sequence=True), "forward_kl + reverse_kl", recompute=True),
    Job(Case("qwen3", pipeline=2), "forward_kl", top_k=8, options={"deallocate_pipeline_outputs": True}),
    Job(Case("qwen3", data=4, replicas=2)),
    Job(Case("qwen3_moe", data=2, expert=2), options={"moe_token_dispatcher_type": "allgather"}),
    Job(Case("llama", data=2), uneven=True, options={"overlap_grad_reduce": True, "bucket_size": 1000}),
    Job(Case("qwen3", tied=True, pipeline=2, chunks=2, data=2), uneven=True, packing=ROWS),
    Job(Case("qwen3", tensor=2, pipeline=2, chunks=2, sequence=True), "forward_kl"),
    Job(Case("qwen3_moe", tensor=2, expert=4, data=2, sequence=True)),
    Job(Case("llama", context=2), "forward_kl", top_k=8, uneven=True, packing=ROWS),
    Job(Case("llama", tied=True, context=4), uneven=True),
    Job(Case("llama", data=2, context=2), "forward_kl", uneven=True),
    Job(Case("qwen3", tensor=2, sequence=True, context=2, tied=True), "reverse_kl", uneven=True),
    Job(Case("gemma3_text", pipeline=2, chunks=2, context=2, tied=True), uneven=True),
    Job(Case("gemma2", tensor=2, tied=True), uneven=True),
    Job(Case("gpt_oss", data=2, expert=2), uneven=True, packing=ROWS),
    Job(Case("gpt_oss", tensor=2, expert=2, sequence=True), uneven=True, router_aux=0.5),
    Job(Case("gpt_oss", pipeline=2, chunks=2), router_aux=0.5),
    Job(Case("qwen3_moe", pipeline=2, chunks=2), uneven=True, router_aux=0.5, recompute=True),
    Job(Case("qwen3_moe", pipeline=2), uneven=True, router_aux=0.5, options=RECOMPUTED_EXPERTS),
    Job(Case("qwen3_moe", context=2, expert=2), uneven=True, router_aux=0.5),
    Job(Case("llama", tensor=2, pipeline=2), depths=2, uneven=True, packing=ROWS),
    Job(Case("qwen3", pipeline=2, chunks=2, tied=True), "reverse_kl", depths=1, recompute=True),
    Job(Case("llama", context=2), depths=2, uneven=True),
    Job(Case("qwen2", data=2), "forward_kl", top_k=8, depths=1),
    Job(Case("qwen3_moe", tensor=2, sequence=True, options={"mlp_only_layers": []}), depths=1),
    Job(Case("deepseek_v3", pipeline=2), depths=2, uneven=True),
    Job(Case("deepseek_v3", tensor=2, sequence=True), uneven=True, kernel=True),
    Job(Case("deepseek_v3", context=2), uneven=True),
    Job(Case("mistral", tensor=2, options={"sliding_window": 5}), uneven=True, kernel=True),
    Job(Case("qwen3", tensor=2, sequence=True), adapter=ALL_LINEAR),
    Job(Case("llama", pipeline=2, chunks=2), "forward_kl", adapter=ALL_LINEAR, recompute=True),
    Job(Case("qwen2", context=2), adapter=["k_proj", "up_proj"], uneven=True),
    Job(Case("gemma3_text", tensor=2, tied=True), adapter=ALL_LINEAR, uneven=True),
    Job(Case("gpt_oss", tensor=2, expert=2, sequence=True), adapter=ALL_LINEAR, router_aux=0.5),
    Job(Case("deepseek_v3", tensor=2, sequence=True), adapter=LATENT_PROJECTIONS),
    Job(
        Case("qwen3_moe", data=2, expert=2, options={"mlp_only_layers": []}),
        adapter=ALL_LINEAR,
        router_aux=0.5,
        recompute=True,
    ),
]
# in the order of the numbers of processes, so that cases share them
SLOW.sort(key=lambda job: job.case.processes)


@pytest.mark.parametrize("job", [*QUICK, *map(slow, SLOW)], ids=lambda job: job.name)
def test_steps_are_those_of_the_other_engine(job: Job) -> None:
    (answer,) = pool_of_meshes(job.case.processes).run(compare, [job], limit=LIMIT)
    assert not isinstance(answer, Failure), answer.text
    differences: list[Difference] = answer
    for rank, difference in enumerate(differences):
        assert not difference.decay, rank
        for sums in (*difference.sums, difference.evaluation):
            assert worst(sums.items())[1] <= 1e-5, (rank, sums)
        assert difference.norm <= 1e-4, rank
        assert worst(difference.gradients.items())[1] <= 1e-5, (rank, difference.gradients)
        assert worst(difference.weights.items())[1] <= 1e-4, (rank, difference.weights)


@pytest.mark.parametrize("model_type", ["qwen3", *map(slow, ["deepseek_v3", "gemma2", "gpt_oss"])])
def test_the_order_of_packed_documents_changes_nothing(model_type: str) -> None:
    """Hidden states of every token are the same, too, not only the sum of gradients."""
    job = Job(Case(model_type, data=2), "cross_entropy")
    for hidden, gradients in pool_of_meshes(2).call(reordered, job, limit=LIMIT):
        assert hidden <= 1e-5
        assert worst(gradients.items())[1] <= 1e-5


def test_an_adapter_is_proven_with_values_that_change_the_logits() -> None:
    """The first B of a run is 0."""
    job = Job(Case("qwen3", tensor=2, tied=True), adapter=ALL_LINEAR)
    for message in pool_of_meshes(2).call(without_an_adapters_part, job, limit=LIMIT):
        assert "the logits of Megatron-Core differ from those of transformers" in message


@pytest.mark.slow
def test_replicas_of_the_optimizers_shards_stay_equal_and_the_parameters_are_their_rounding() -> None:
    job = Job(Case("qwen3", data=4, replicas=2))
    assert pool_of_meshes(4).call(replicas_apart, job, limit=LIMIT) == [(0.0, 0.0)] * 4


@pytest.mark.slow
def test_a_checkpoint_of_replicas_in_bfloat16_is_read_by_an_interleaved_pipeline() -> None:
    """The float32 weights and the moments are the same to the bit, and the parameters are their rounding."""
    cases = Case("qwen3", tied=True, data=2, replicas=2), Case("qwen3", tied=True, pipeline=2, chunks=2)
    for differences in pool_of_meshes(2).call(resumed_in_another_layout, cases, limit=LIMIT):
        assert worst(differences.items())[1] == 0.0, differences


@pytest.mark.parametrize(
    ("ranges", "held"),
    [
        ((slice(0, 3), slice(3, 6)), ""),
        ((slice(0, 3), slice(4, 6)), "[(0, 3), (4, 6)]"),
        ((slice(0, 3), slice(2, 6)), "[(0, 3), (2, 6)]"),
        ((slice(0, 5), slice(5, 5)), "[(0, 5)]"),
    ],
)
def test_elements_that_no_data_rank_has_once_are_refused(ranges: tuple[slice, slice], held: str) -> None:
    expected = f"the data ranks have the elements {held} of parameter 'norm': expected each of its 6 elements once"
    assert pool_of_meshes(2).call(wrong_partition, ranges) == [expected if held else ""] * 2


@pytest.mark.slow
def test_the_model_that_has_no_conversion_is_named() -> None:
    for message in pool_of_meshes(2).call(refused_teacher, "gemma", limit=LIMIT):
        assert message.startswith("teacher.model: model_type 'gemma' has no conversion to Megatron-Core: expected")


@pytest.mark.slow
def test_a_checkpoint_of_gpt_oss_has_the_weights_of_all_experts() -> None:
    case = Case("gpt_oss", tensor=2, expert=2, sequence=True)
    for differences in pool_of_meshes(2).call(saved_and_loaded, case, limit=LIMIT):
        assert worst(differences.items())[1] == 0.0, differences


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job(Case("qwen3", data=2)),
        Job(Case("qwen3_moe", data=2, expert=2), router_aux=0.5, fixed_experts=True, recompute=True),
        Job(Case("qwen3", tensor=2, sequence=True), adapter=ALL_LINEAR),
    ],
    ids=lambda job: job.name,
)
def test_bfloat16_is_as_near_to_float64_as_the_other_engine(job: Job) -> None:
    """The optimizer's weights are those of the folder, in float32, although the parameters are rounded.

    With experts, this is measured where rounding does not change which experts are chosen: both engines do that.
    """
    (answer,) = pool_of_meshes(job.case.processes).run(distances, [job], limit=LIMIT)
    assert not isinstance(answer, Failure), answer.text
    for of_rank in answer:
        assert of_rank.float32 < 1e-5 < of_rank.bfloat16
        for residual_dtype, limit in ((None, 1.25), (torch.bfloat16, 1.5)):  # Megatron-Core rounds the weights, too
            assert of_rank.megatron[residual_dtype] < limit * of_rank.bfloat16, of_rank
        assert of_rank.weights == 0


@pytest.mark.slow
def test_an_average_is_of_the_float32_weights() -> None:
    """Rounded to bfloat16, they would differ by up to 2e-3 of their size."""
    for difference in pool_of_meshes(2).call(average_apart, Job(Case("qwen3", data=2)), limit=LIMIT):
        assert difference < 1e-7
