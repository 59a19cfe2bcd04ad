"""Uploads an exported folder to a model repository of the Hugging Face hub: `stillhouse export --push`.

The address of the hub and the token are those of huggingface_hub: HF_ENDPOINT, and HF_TOKEN or `hf auth login`.
"""

from pathlib import Path

from huggingface_hub import HfApi

from stillhouse.libraries import reading

_HUB = "httpx2"


def prepare_repository(name: str) -> None:
    """Create the model repository `name`, private, if it does not exist.

    Raises ValueError if the name is not one, if the hub cannot be reached, or if the token may not write to it.
    """
    with reading(f"--push {name}: the hub did not accept the repository", library=_HUB):
        HfApi().create_repo(name, private=True, exist_ok=True)


def push_folder(folder: Path, name: str, what: str) -> str:
    """Upload all files of a folder; return the address of the commit. what: the commit's message

    Raises ValueError, which says how to upload the folder again, if the upload fails.
    """
    again = f"{folder} is complete; upload it with `hf upload {name} {folder}`"
    with reading(f"--push {name}: the upload failed ({again})", library=_HUB):
        return str(HfApi().upload_folder(folder_path=folder, repo_id=name, commit_message=what).commit_url)
