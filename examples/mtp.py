"""Draft heads for speculative decoding: trained on a text, or on the main model's own distribution.

    python examples/mtp.py

The main model is the demo's teacher, frozen. Its layers for multi-token prediction (MTP) are trained twice from the
same initial weights and on the same text: once with the cross-entropy of the text's tokens, and once with the
divergence from the main model's distribution of the same token. Then transformers generates with each of them as the
drafter. The table shows how many drafted tokens the main model accepts.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from stillhouse import TEACHER, Decoder, DistillTargets, StepLoss, parse_objective
from stillhouse.models.mtp import MultiTokenDecoder, find_layers
from stillhouse.tools.demo.corpus import collect_documents, split_of
from stillhouse.tools.demo.student import TEACHER as DEMO_TEACHER
from stillhouse.tools.demo.student import token_stream

ROW, ROWS = 128, 2  # tokens per row, rows per step
LEARNING_RATE = 4e-3
PROMPT = 32  # tokens
OBJECTIVES = {"cross-entropy": "cross_entropy", "distilled": "forward_kl"}


def main_model() -> Decoder:
    """Return the demo's teacher as a GLM-4-MoE: layers without experts are the same in both families."""
    source = AutoConfig.from_pretrained(DEMO_TEACHER, trust_remote_code=False)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "eos_token_id")
    config = Glm4MoeConfig(
        **{name: getattr(source, name) for name in names},
        rope_parameters={**source.rope_parameters, "partial_rotary_factor": 1.0},
        use_qk_norm=True,
        first_k_dense_replace=source.num_hidden_layers,
        n_routed_experts=4,  # only the MTP layers have experts
        num_experts_per_tok=2,
        moe_intermediate_size=source.intermediate_size // 4,
    )
    teacher = AutoModelForCausalLM.from_pretrained(DEMO_TEACHER, dtype=torch.float32, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.load_state_dict(teacher.state_dict())
    return Decoder(model.eval())


def batches(tokens_T: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield rows [B, S + 1] from random places of the text. Each row is treated as one document."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts_B1 = torch.randint(len(tokens_T) - ROW, (ROWS, 1), generator=generator)
        yield tokens_T[starts_B1 + torch.arange(ROW + 1)]


def train(decoder: MultiTokenDecoder, tokens_T: torch.Tensor, loss: str, steps: int, seed: int) -> None:
    """Train only the MTP layers, with the same objective at every depth."""
    spec = parse_objective(loss)
    processor = StepLoss(spec, normalizer=ROWS * ROW)
    optimizer = torch.optim.AdamW(decoder.layers.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for rows_BS in batches(tokens_T, steps, seed):
        ids_BS, labels_BS = rows_BS[:, :-1], rows_BS[:, 1:]
        position_ids_BS = torch.arange(ROW).expand(ROWS, ROW)
        signals = {TEACHER: decoder.main.signal(ids_BS, position_ids_BS)} if spec.needs_teacher else {}
        targets = DistillTargets(labels_BS, signals=signals)
        context = targets.shift_for_mtp(position_ids_BS, decoder.depths)
        _, *at_depths = decoder(ids_BS, position_ids_BS, processor=processor, context=context)
        sum(output.loss for output in at_depths).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


class Accepted(BaseStreamer):
    """Counts the tokens that the main model accepts of each draft. `put` gets them and one more token."""

    def __init__(self) -> None:
        self.puts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.numel())

    def end(self) -> None:
        pass

    def of_drafts(self) -> list[int]:
        """Return the counts without the prompt, the token before the first draft, and the last draft."""
        return [put - 1 for put in self.puts[2:-1]]


def acceptance(folder: Path, prompts_PS: torch.Tensor, new_tokens: int, sampled: bool, seed: int) -> list[int]:
    """Generate with transformers from a saved folder. Return the number of accepted tokens of each draft."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    find_layers(model)
    torch.manual_seed(seed)
    counts = []
    for prompt_S in prompts_PS:
        accepted = Accepted()
        options = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
        options |= {"max_new_tokens": new_tokens, "eos_token_id": None, "streamer": accepted}
        model.generate(prompt_S[None], use_mtp=True, **options)
        counts += accepted.of_drafts()
    return counts


def main(steps: int, depths: int, prompts: int, new_tokens: int, seed: int) -> dict[tuple[str, bool], float]:
    """Print the table and return it: accepted tokens per draft, by (objective, whether sampled)."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TEACHER, trust_remote_code=False)
    documents = collect_documents()
    training_T, held_out_T = (
        token_stream(tokenizer, [document for document in documents if split_of(document.name) == split])
        for split in ("student", "held_out")
    )
    prompts_PS = held_out_T[: len(held_out_T) // PROMPT * PROMPT].view(-1, PROMPT)
    prompts_PS = prompts_PS[torch.linspace(0, len(prompts_PS) - 1, prompts).long()]
    start = MultiTokenDecoder.new(main_model(), depths, train_main=False)
    table = {}
    print(f"{depths} tokens per draft; accepted by the main model, mean ± standard error")
    for name, loss in OBJECTIVES.items():
        decoder, begun = copy.deepcopy(start), time.perf_counter()
        train(decoder, training_T, loss, steps, seed)
        seconds = time.perf_counter() - begun
        with tempfile.TemporaryDirectory() as folder:
            decoder.save_pretrained(folder)
            columns = []
            for sampled in (False, True):
                counts = torch.tensor(acceptance(Path(folder), prompts_PS, new_tokens, sampled, seed)).float()
                table[name, sampled] = float(counts.mean())
                error = float(counts.std()) / len(counts) ** 0.5
                columns.append(f"{'sampled' if sampled else 'greedy'} {counts.mean():.3f} ± {error:.3f}")
        print(f"{name:>13}: {', '.join(columns)} ({steps} steps, {seconds:.0f} s)")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help=f"steps of {ROW * ROWS} tokens, for each objective")
    parser.add_argument("--depths", type=int, default=2, help="drafted tokens")
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts, from the held-out text")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens generated after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # transformers warns about the MTP layers at each load, because a plain model does not have them
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main(**vars(arguments))
