"""Where the weights that an engine was told to load lie on this host."""

from pathlib import Path


def local_directory(model: str, *, revision: str | None) -> Path | None:
    """A model's local directory: itself, or its snapshot in the Hugging Face cache. Asks no network."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
