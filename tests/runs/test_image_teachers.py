"""Teachers that read images: a cache gives the gradients of the teacher in the job, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit import first_is_quick
from kit.image_models import picture
from kit.image_runs import SETTINGS, write_image_run
from kit.runs import session_of, write_run
from kit.teacher_gradients import assert_close, gradients

from stillhouse.config import ConfigError
from stillhouse.signals.signal_spec import SignalKind
from stillhouse.tools.write_cache import write_cache

FAMILIES = ["qwen3_vl", "idefics3", "gemma3", "llava_onevision"]


def cached(folder: Path, kind: SignalKind = "hidden") -> dict[str, Any]:
    out = folder / f"cache-{kind}"
    write_cache(write_run(folder, **SETTINGS), out, kind, top_k=8, shard_bytes=5000)
    return {"teacher.cache": str(out)}


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
def test_a_cache_gives_the_gradients_of_the_teacher_in_the_job(family: str, tmp_path: Path) -> None:
    write_image_run(tmp_path, family)
    in_job = gradients(tmp_path, **SETTINGS)
    assert_close(gradients(tmp_path, **cached(tmp_path), **SETTINGS), in_job)


def test_a_cache_of_other_images_or_pixels_is_refused_by_name(tmp_path: Path) -> None:
    write_image_run(tmp_path, "qwen3_vl")
    settings = SETTINGS | cached(tmp_path)
    with pytest.raises(ConfigError, match=r"teacher\.cache: .* was written with other pixels of images, and"):
        session_of(tmp_path, cached=True, **settings, **{"data.image_pixels": 4096})
    path = tmp_path / "student" / "processor_config.json"
    processor = path.read_text()
    changed = json.loads(processor)
    changed["image_processor"]["image_mean"] = [0.4, 0.4, 0.4]
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"teacher\.cache: .* was written with other pixels of images, and"):
        session_of(tmp_path, cached=True, **settings)
    path.write_text(processor)
    picture(99, 12, 12).save(tmp_path / "1.png")  # the image had this size, so that the tokens are the same
    with pytest.raises(ConfigError, match=r"teacher\.cache: .* lacks 1 of the 24 documents.*an image changed"):
        session_of(tmp_path, cached=True, **settings)
