"""Images in documents: an add-on, which the core does not import (group `stillhouse.media` of the registry)."""

from pathlib import Path

#: the name under which this add-on is registered
NAME = "images"
#: files of which a model with a processor has one
_FILES = ("processor_config.json", "preprocessor_config.json")
_MORE_FILES = ("video_preprocessor_config.json",)


def processor_files(name_or_path: str, revision: str | None = None) -> list[Path]:
    """The files of the processor of a folder or a hub id; empty if it has none. Raises ValueError."""
    from transformers.utils import cached_file

    from stillhouse.libraries import reading

    files = {}
    for name in (*_FILES, *_MORE_FILES):
        with reading(f"the processor of {name_or_path!r} cannot be read"):
            path = cached_file(
                name_or_path,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        if path is not None:
            files[name] = Path(path)
    return [*files.values()] if files.keys() & {*_FILES} else []
