"""Importing this does once what every process of a test would do by itself, such as compiling patterns of libraries.

The fork server imports it, and the processes that it forks inherit the results. A thread does not survive a fork, so
no step here starts one: there is no backward pass and no progress bar, and tokenizers work without threads.
"""

import os
import tempfile
from pathlib import Path

import torch
from kit.report_runs import make_run
from kit.runs import build_model
from transformers.utils.logging import disable_progress_bar

from stillhouse.data import load_tokenizer
from stillhouse.models.pretrained import load_causal_lm
from stillhouse.report.page import write_report

os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)
disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:
    for family in ("llama", "qwen3"):
        load_causal_lm(build_model(Path(folder) / family, family))
        load_tokenizer(f"{folder}/{family}")
    write_report(make_run(Path(folder) / "run", steps=2))
