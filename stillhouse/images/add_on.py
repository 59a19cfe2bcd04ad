"""What the core calls of this add-on. This module is light: it loads the others when something has images."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillhouse.images import processor_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stillhouse.config import RunConfig
    from stillhouse.data.media import MediaInputs, MediaProcessor
    from stillhouse.data.media_files import MediaFile
    from stillhouse.data.record import Record
    from stillhouse.engine.engine import Engine
    from stillhouse.loops.session import Data
    from stillhouse.models import Decoder
    from stillhouse.run.setup import RunSetup
    from stillhouse.signals import SignalSource, SignalStore

#: the most images of a document that a page shows, because each one adds up to 30 kB to it
SHOWN = 8


class Images:
    """What the core calls: functions of this package, and the processor of a model, if it has one.

    demo_folder, demo_words: the default folder of the demo, and what it is for.
    """

    demo_folder, demo_words = "runs/image_demo", "for vision-language models"

    def find_processor(
        self, name_or_path: str, tokenizer: "PreTrainedTokenizerBase", *, revision: str | None = None, **options: Any
    ) -> "MediaProcessor | None":
        if not processor_files(name_or_path, revision):
            return None
        from stillhouse.images.processor import ImageProcessor

        return ImageProcessor.find(name_or_path, tokenizer, revision=revision, **options)

    def with_files(self, record: "Record") -> "Record":
        from stillhouse.images.columns import with_images

        return with_images(record)

    def shown(self, files: "Sequence[MediaFile]") -> dict[str, Any]:
        from stillhouse.images.decode import thumbnail

        return {"images": [thumbnail(image) for image in files[:SHOWN]], "image_count": len(files)}

    def prove(
        self,
        decoder: "Decoder",
        processor: "MediaProcessor",
        agreed: "Callable[[], AbstractContextManager[Any]]",
    ) -> None:
        from stillhouse.images.proof import prove_images

        prove_images(decoder, processor.example_documents(), processor.join, agreed)

    def require_support(self, config: "RunConfig") -> None:
        from stillhouse.images.prepare import require_image_support

        require_image_support(config)

    def require_layout(self, setup: "RunSetup", media_inputs: "MediaInputs") -> None:
        from stillhouse.images.prepare import require_image_layout

        require_image_layout(setup, media_inputs)

    def with_models_proven(
        self,
        data: "Data",
        engine: "Engine",
        source: "SignalSource",
        stores: "Mapping[str, SignalStore] | None" = None,
    ) -> "Data":
        from stillhouse.images.prepare import with_images_proven

        return with_images_proven(data, engine, source, stores)

    def write_demo(self, folder: Path) -> tuple[Path, ...]:
        from stillhouse.images.digits_demo import write_image_run

        return write_image_run(folder)


IMAGES = Images()
