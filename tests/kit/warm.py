"""Importing this does once what every process of a test would do by itself, such as compiling patterns of libraries.

The fork server imports it, and the processes that it forks inherit the results. It calls no backward pass, because
autograd's threads do not survive a fork.
"""

import tempfile
from pathlib import Path

from kit.report_runs import make_run
from kit.runs import save_model

from stillhouse.data import load_tokenizer
from stillhouse.models.pretrained import load_causal_lm
from stillhouse.output.report import write_report

with tempfile.TemporaryDirectory() as folder:
    for family in ("llama", "qwen3"):
        load_causal_lm(save_model(Path(folder) / family, family))
        load_tokenizer(f"{folder}/{family}")
    write_report(make_run(Path(folder) / "run", steps=2))
