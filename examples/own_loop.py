"""The objective in your own training loop, without logits, for any Hugging Face causal language model.

    python examples/own_loop.py TEACHER STUDENT "some text to learn from"

A loop with `log_softmax` and `kl_div` needs the logits of both models. Here the models return hidden states. The
divergence over the full vocabulary is computed from them and the two heads, one chunk of tokens at a time.
"""

import sys

import torch

from stillhouse import CrossEntropy, Decoder, Distill, check_same_tokenizer, jsd, linear_objective, load_tokenizer


def main(teacher_name: str, student_name: str, text: str) -> None:
    tokenizer = load_tokenizer(student_name)
    check_same_tokenizer(tokenizer, load_tokenizer(teacher_name))  # the same ids mean the same text
    teacher = Decoder.from_pretrained(teacher_name, dtype="auto").requires_grad_(False)
    student = Decoder.from_pretrained(student_name, dtype="float32").train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    ids_BS = tokenizer(text, return_tensors="pt").input_ids
    labels_T = torch.cat([ids_BS[0, 1:], torch.tensor([-1])])  # row t predicts the token t + 1

    def objective(*, hidden_states, head, context, depth=0):
        """The output processor: computes the loss from hidden states and head, without logits."""
        return linear_objective(
            hidden_states.flatten(0, -2),
            head,
            [CrossEntropy(labels_T, scale=0.3), Distill(context, jsd(0.5), scale=0.7)],
            weights_T=(labels_T >= 0).float(),
            normalizer=len(labels_T) - 1,
        )

    for step in range(20):
        output = student(ids_BS, processor=objective, context=teacher.signal(ids_BS))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {output.loss.item():.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"expected a teacher, a student and a text:\n\n{__doc__}")
    main(*sys.argv[1:])
