"""Fetches one file of the hub into the hub's own cache; what arrived before an interruption is kept and used.

huggingface_hub throws a partial file away when its process is stopped. Here it stays beside the blobs until it is
whole; then it becomes the blob that huggingface_hub looks for.
"""

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from .errors import ModelError

PARTIAL = ".headrace.incomplete"
"""End of the name of a partial blob; before it stands the blob's name."""
_PLAIN_HTTP_LIMIT_BYTES = 50 * 10**9
"""the hub serves larger files only in its own protocol"""


def fetch_file(repo: str, name: str, revision: str, repo_folder: Path) -> None:
    """Fetch a file into the hub cache's folder of its repository.

    The caller holds a lock on the repository. Raises whatever huggingface_hub does, and ModelError if the content
    is not what the hub says it is.
    """
    import huggingface_hub
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = huggingface_hub.hf_hub_url(repo, name, revision=revision)
    metadata = huggingface_hub.get_hf_file_metadata(url)
    if metadata.etag is None or metadata.size is None or metadata.size > _PLAIN_HTTP_LIMIT_BYTES:
        huggingface_hub.hf_hub_download(repo, name, revision=revision)
        return
    headers = build_hf_headers()
    if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # another host has no business with the token
    blob = repo_folder / "blobs" / metadata.etag
    partial = blob.with_name(blob.name + PARTIAL)
    blob.parent.mkdir(parents=True, exist_ok=True)
    if not blob.exists():
        with open(partial, "ab") as file:
            if file.tell() > metadata.size:
                file.truncate(0)
            http_get(metadata.location, file, resume_size=file.tell(), headers=headers, expected_size=metadata.size)
        put_in_place(partial, blob, metadata.etag, f"{repo}/{name}")
    link = repo_folder / "snapshots" / revision / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))


def put_in_place(fetched: Path, path: Path, etag: str, name: str) -> None:
    """Make a file that has arrived, and lies on the same disk, the file `path`. etag: the SHA-256 of a large file of
    the hub, the git id of a small one. Raises ModelError, and removes the file, if it has another."""
    with open(fetched, "rb+") as file:
        os.fsync(file.fileno())
        digest = etag
        if re.fullmatch("[0-9a-f]{64}", etag):
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        elif re.fullmatch("[0-9a-f]{40}", etag):
            header = f"blob {fetched.stat().st_size}\0".encode()
            digest = hashlib.sha1(header + file.read()).hexdigest()
    if digest != etag:
        fetched.unlink()
        raise ModelError(
            f"{name} arrived damaged: its hash is {digest[:12]}..., expected {etag[:12]}...; it was thrown away",
            remedies=["the same command again"],
        )
    fetched.replace(path)
