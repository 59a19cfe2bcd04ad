"""How far is a teacher in fp8 from the same teacher in bfloat16?

The demo's teacher reads held-out text in float32, in bfloat16 and in fp8. Writes the forward KL between them, the
agreement and the teacher's own cross-entropy to benchmarks/results/teacher_float8-<date>.json. Without a GPU that
multiplies in fp8, it uses torchao's products for the CPU, which torchao itself refuses to use: the same rounding of
weights and inputs, with another order of the additions.

    python -m benchmarks.teacher_float8

T tokens, V vocabulary.
"""

import json
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.record import result_file, write_result
from benchmarks.teacher_economy import rows
from stillhouse.models import Decoder
from stillhouse.models.quantized import float8_problem, round_to_float8, weight_bytes
from stillhouse.tools.demo.student import TEACHER


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and float8_problem("cuda") is None else "cpu")
    ids_BS = rows().to(device)
    labels_T = ids_BS[:, 1:].flatten()
    logits, layers_bytes = {}, {}
    for way, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("fp8", "bfloat16")):
        teacher = Decoder.from_pretrained(TEACHER, dtype=dtype, device=device)
        if way == "fp8":
            with patch("torchao.quantization.quant_api._check_hardware_support"):
                round_to_float8(teacher.pretrained)
        layers_bytes[way] = weight_bytes(teacher.backbone.layers)  # type: ignore[arg-type]
        with torch.no_grad():
            logits[way] = teacher(ids_BS)[:, :-1].flatten(0, 1).float()
    log_p = {way: logits_TV.log_softmax(-1) for way, logits_TV in logits.items()}
    kl_T = forward_kl(log_p["bfloat16"], log_p["fp8"])
    result = {
        "theme": "teacher in fp8",
        "products": str(device),
        "tokens": len(labels_T),
        "kl_from_bfloat16_nats_per_token": float(kl_T.mean()),
        "largest_kl_of_a_token": float(kl_T.max()),
        "kl_of_fp8_from_float32": float(forward_kl(log_p["float32"], log_p["fp8"]).mean()),
        "kl_of_bfloat16_from_float32": float(forward_kl(log_p["float32"], log_p["bfloat16"]).mean()),
        "agreement_with_bfloat16": float((logits["fp8"].argmax(-1) == logits["bfloat16"].argmax(-1)).float().mean()),
        "cross_entropy": {way: float(cross_entropy(logits_TV, labels_T)) for way, logits_TV in logits.items()},
        "layers_bytes": layers_bytes,
    }
    print(json.dumps(result, indent=1))
    write_result(result_file("teacher_float8"), result)


def forward_kl(log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)


if __name__ == "__main__":
    main()
