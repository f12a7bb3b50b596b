"""From what the user calls a model to files on this disk: folder, .gguf file, hub id, or the default model."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .cache import check_room, disk_error, lock, make_folder
from .config import ModelConfig
from .default_model import NAME as DEFAULT_NAME
from .default_model import fetch_default_model, find_default_model
from .errors import CapacityError, HeadraceError, ModelNotFound
from .hub_file import PARTIAL, fetch_file
from .json_text import parse_json
from .model_file import check_folder, has_file
from .progress import Report, bytes_under, watch_growth
from .suggest import did_you_mean
from .units import format_bytes

HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)")
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_NETWORK_PACKAGES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this disk. path: a folder with config.json, or a .gguf file. name: what to call it."""

    path: Path
    kind: Literal["folder", "gguf"]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model in a cache. num_bytes: on the disk, all revisions. missing: why it cannot be used, or ""."""

    model: LocalModel
    num_bytes: int
    missing: str = ""


def is_default(config: ModelConfig) -> bool:
    """True for no name, and for the default model's own unless something here has it."""
    return not config.model or (config.model == DEFAULT_NAME and not os.path.exists(config.model))


def resolve_model(config: ModelConfig, report: Report, *, memory_bytes: int | None = None) -> LocalModel:
    """Find the model, and fetch it if it is not here. `report` takes lines for the user.

    memory_bytes: if known, weights larger than this are refused before they are downloaded.
    Raises ModelNotFound, or CapacityError if disk or memory cannot hold it.
    """
    if is_default(config):
        path = fetch_default_model(offline=_is_offline(config), report=report)
        return LocalModel(path=path, kind="gguf", name=DEFAULT_NAME)
    if os.path.exists(os.path.expanduser(config.model)):
        return _local(Path(config.model).expanduser())
    _require_hub_id(config.model)
    with_weights = config.load_format != "dummy"
    folder = _from_hub(config.model, config, report, with_weights=with_weights, memory_bytes=memory_bytes)
    return LocalModel(path=folder, kind="folder", name=config.model)


def resolve_config(config: ModelConfig, report: Report) -> LocalModel:
    """Like `resolve_model`, but a hub model's weights are not fetched: config and tokenizer only."""
    if is_default(config):
        path = find_default_model()
        if path is None:
            raise ModelNotFound(
                f"the default model {DEFAULT_NAME} is not here yet, and its configuration is part of its one file",
                remedies=["headrace download"],
            )
        return LocalModel(path=path, kind="gguf", name=DEFAULT_NAME)
    if os.path.exists(os.path.expanduser(config.model)):
        return _local(Path(config.model).expanduser())
    _require_hub_id(config.model)
    folder = _from_hub(config.model, config, report, with_weights=False, memory_bytes=None)
    return LocalModel(path=folder, kind="folder", name=config.model)


def resolve_tokenizer(config: ModelConfig, report: Report) -> Path:
    """The folder that `config.tokenizer` (a folder or a hub id) names. Raises ModelNotFound."""
    path = Path(config.tokenizer).expanduser()
    if os.path.isdir(path):
        return check_folder(path)
    _require_hub_id(config.tokenizer)
    return _from_hub(config.tokenizer, config, report, with_weights=False, memory_bytes=None)


def cached_models() -> list[CachedModel]:
    """The default model if it is here, and every model in the hub's cache, by name."""
    found: list[CachedModel] = []
    default = find_default_model()
    if default is not None:
        model = LocalModel(path=default, kind="gguf", name=DEFAULT_NAME)
        found.append(CachedModel(model=model, num_bytes=default.stat().st_size))
    for repo_folder in sorted(_hub_cache().glob("models--*--*")):
        name = repo_folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = sorted(repo_folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        folder = _snapshot(name, "") or (snapshots[-1] if snapshots else None)
        model = LocalModel(path=folder or repo_folder, kind="folder", name=name)
        missing = "no files" if folder is None else _missing(folder, with_weights=True)
        found.append(CachedModel(model=model, num_bytes=bytes_under(repo_folder), missing=missing))
    return found


def hub_problem(error: BaseException, repo: str) -> HeadraceError | None:
    """What an exception of huggingface_hub means, as an error of ours; None if it is none of the hub's."""
    from huggingface_hub import errors

    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_error(cause, _hub_cache())
        if "No space left on device" in str(cause):
            return disk_error(OSError(errno.ENOSPC, "No space left on device"), _hub_cache())
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(
            f"{repo} is gated: its owners must grant you access",
            remedies=["accept the terms on its page", "hf auth login", "HF_TOKEN=... headrace download " + repo],
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{repo} has no such revision on the hub", remedies=["leave out --revision"])
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return ModelNotFound(
            f"the hub has no model {repo}, or it is private{did_you_mean(repo, _cached_names())}",
            remedies=["hf auth login", "headrace models"],
        )
    if isinstance(error, errors.HFValidationError):
        return _not_a_model(repo)
    from_network = type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES
    if from_network or isinstance(error, OSError):
        reason = f"it answered {status}" if status is not None else _first_line(error)
        return ModelNotFound(
            f"cannot reach the hub for {repo}: {reason}",
            remedies=["check the network, HF_ENDPOINT and HTTPS_PROXY", "headrace models", "a folder or .gguf file"],
        )
    return None


# ---- on this disk -----------------------------------------------------------------------------------------
def _local(path: Path) -> LocalModel:
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return LocalModel(path=path, kind="gguf", name=path.stem)
        raise ModelNotFound(
            f"{path} is a {path.suffix or 'plain'} file; a model is a folder, a .gguf file or a hub id",
            remedies=[str(path.parent)] if (path.parent / "config.json").is_file() else [],
        )
    if not path.is_dir():
        raise ModelNotFound(f"{path} is neither a folder nor a file with a model", remedies=["headrace models"])
    if not has_file(path / "config.json"):
        ggufs = sorted(path.glob("*.gguf"))
        try:
            entries = sorted(entry.name for entry in path.iterdir())
        except OSError as error:
            raise ModelNotFound(f"the folder {path} cannot be read: {error.strerror}") from None
        holds = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "") if entries else "nothing"
        raise ModelNotFound(
            f"the folder {path} has no config.json (it holds {holds})",
            remedies=[str(gguf) for gguf in ggufs[:3]]
            or ["a folder as save_pretrained writes it", "headrace models"],
        )
    return LocalModel(path=check_folder(path), kind="folder", name=path.resolve().name)


def _require_hub_id(model: str) -> None:
    looks_like_path = model.startswith(("/", ".", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1
    if looks_like_path:
        raise ModelNotFound(
            f"there is no file or folder {model}", remedies=["headrace models", "org/name for the hub"]
        )
    if not _HUB_ID.fullmatch(model):
        raise _not_a_model(model)


def _not_a_model(model: str) -> ModelNotFound:
    shown = model if len(model) <= 60 else model[:57] + "..."
    return ModelNotFound(
        f"{shown!r} is neither a file or folder here nor a hub id (org/name){did_you_mean(model, _cached_names())}",
        remedies=["headrace models", "headrace download ORG/NAME", "leave out MODEL for the default model"],
    )


# ---- on the hub and in its cache --------------------------------------------------------------------------
def _from_hub(
    repo: str, config: ModelConfig, report: Report, *, with_weights: bool, memory_bytes: int | None
) -> Path:
    """The snapshot folder of a hub model with the files that are needed."""
    revision = config.revision if repo == config.model else ""
    cached = _snapshot(repo, revision)
    missing = "it is not in the cache" if cached is None else _missing(cached, with_weights=with_weights)
    if _is_offline(config):
        if cached is not None and not missing:
            return cached
        raise ModelNotFound(
            f"{repo} cannot be used offline: {missing}",
            remedies=[f"headrace download {repo} without --offline", "headrace models"],
        )
    try:
        return _download(repo, revision, config, report, with_weights=with_weights, memory_bytes=memory_bytes)
    except Exception as error:
        problem = hub_problem(error, repo)
        if problem is None:
            raise error
        if cached is not None and not missing and problem.reason.startswith("cannot reach"):
            report(f"{problem.reason}; using the copy in the cache")
            return cached
        raise problem from error


def _download(
    repo: str, revision: str, config: ModelConfig, report: Report, *, with_weights: bool, memory_bytes: int | None
) -> Path:
    import huggingface_hub

    info = huggingface_hub.HfApi().model_info(
        repo, revision=revision or None, files_metadata=True, timeout=HUB_TIMEOUT_S
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = _choose(repo, sizes, with_weights=with_weights, allow_pickle=config.allow_pickle)
    if config.trust_remote_code:
        wanted += [name for name in sizes if name.endswith(".py") and "/" not in name]
    weight_bytes = sum(sizes[name] for name in wanted if name.endswith((".safetensors", ".bin")))
    if memory_bytes is not None and weight_bytes > memory_bytes:
        raise CapacityError(
            f"{repo} does not fit: its weights are {format_bytes(weight_bytes)}, and {format_bytes(memory_bytes)}"
            " of memory are free; nothing was downloaded",
            remedies=[f"headrace plan {repo}"],
        )
    _fetch(repo, [name for name in wanted if not _is_cached(repo, name, info.sha)], info.sha, sizes, report)
    # All is there: this only records which commit the revision is, and finds what changed in this very moment.
    return Path(huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=wanted))


def _fetch(repo: str, absent: Sequence[str], revision: Any, sizes: dict[str, int], report: Report) -> None:
    """Fetch files one after another, in this thread: a pool of threads would hold up Ctrl-C."""
    if not absent:
        return
    repo_folder = _hub_cache() / f"models--{repo.replace('/', '--')}"
    kept_bytes = bytes_under(repo_folder, "*" + PARTIAL)
    before = bytes_under(repo_folder) - kept_bytes
    total = sum(sizes[name] for name in absent)
    check_room(repo_folder, total - kept_bytes, f"downloading {repo}")
    report(f"downloading {repo}: {len(absent)} files, {format_bytes(total)}")
    if kept_bytes:
        report(f"going on after {format_bytes(kept_bytes)} that are here already")
    with (
        lock(make_folder(repo_folder) / ".headrace.lock", report),
        watch_growth(repo, total, lambda: bytes_under(repo_folder) - before, report),
    ):
        for name in absent:
            if not _is_cached(repo, name, revision):  # another process may have fetched it
                fetch_file(repo, name, revision, repo_folder)


def _choose(repo: str, sizes: dict[str, int], *, with_weights: bool, allow_pickle: bool) -> list[str]:
    """The files to fetch: configuration and tokenizer, and the weights in their best format."""
    top = [name for name in sizes if "/" not in name]
    modules = [name for name in sizes if _MODULE_FILE.fullmatch(name)]  # of sentence-transformers
    texts = [name for name in top if name.endswith(_TEXT_SUFFIXES)]
    texts += [name for name in modules if name.endswith(".json")]
    if "config.json" not in top:
        ggufs = [name for name in top if name.endswith(".gguf")]
        raise ModelNotFound(
            f"{repo} has no config.json on the hub"
            + (f"; it holds GGUF files ({', '.join(ggufs[:3])}, ...)" if ggufs else ""),
            remedies=[f"hf download {repo} {ggufs[0]} --local-dir . and headrace complete ./{ggufs[0]} PROMPT"]
            if ggufs
            else ["headrace models"],
        )
    if not with_weights:
        return texts
    # Some repositories hold a second copy of all weights in their maker's own naming.
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if weights:
        return texts + weights + [name for name in modules if name.endswith(".safetensors")]
    pickles = [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    if pickles and not allow_pickle:
        raise ModelNotFound(
            f"{repo} has only pickle weights ({pickles[0]}), which can run code when they are read",
            remedies=["--allow-pickle (tensors only)", "a safetensors version of the model"],
        )
    if not pickles:
        raise ModelNotFound(f"{repo} has no weights on the hub", remedies=["--load-format dummy"])
    return texts + pickles + [name for name in modules if name.endswith(".bin")]


def _missing(folder: Path, *, with_weights: bool) -> str:
    """Why a snapshot is not complete, or ""."""
    if not (folder / "config.json").is_file():
        return "its config.json is not in the cache"
    if not with_weights:
        return ""
    for index in (*folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model*.bin.index.json")):
        try:
            names = set(parse_json(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return f"{index.name} in the cache is damaged"
        absent = [name for name in names if not (folder / str(name)).is_file()]
        if not absent:
            return ""
        if index.name.endswith(".safetensors.index.json"):
            return f"{len(absent)} of its {len(names)} weight files are not in the cache"
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    return "" if has_weights else "its weights are not in the cache"


def _snapshot(repo: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json", cache_dir=_hub_cache(), revision=revision or None)
    return Path(found).parent if isinstance(found, str) else None


def _is_cached(repo: str, name: str, revision: Any) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, name, cache_dir=_hub_cache(), revision=revision), str)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _cached_names() -> Sequence[str]:
    folders = _hub_cache().glob("models--*--*")
    return [DEFAULT_NAME, *(f.name.removeprefix("models--").replace("--", "/", 1) for f in folders)]


def _is_offline(config: ModelConfig) -> bool:
    from huggingface_hub import constants

    return config.offline or bool(constants.HF_HUB_OFFLINE)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
