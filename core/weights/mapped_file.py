"""A weight file mapped read-only into memory, and errors that name it."""

import errno
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, WeightError
from ..model_file import LFS_POINTER
from ..units import format_bytes

Bytes = npt.NDArray[np.uint8]

_SHRUNK = ("wait until whatever writes the file is done", "download it again")
_RESIDENT_BYTES = 64 << 20
"""How much of a file may count as this process's memory at a time."""


class MappedFile:
    """Owns one mapping. Views of it stay valid after `close`: the memory is unmapped with the last of them.

    A file that is read once from end to end would count whole as the process's memory, beside the copy on the
    device. So pages are given back to the system's cache on the way; a view that still needs them finds them there.
    """

    __slots__ = ("_bytes", "_map", "_num_viewed", "path")

    def __init__(self, path: Path) -> None:
        """Raises WeightError if the file cannot be opened, is empty, or is a Git LFS pointer, CapacityError if memory
        lacks."""
        self.path = path
        self._map: mmap.mmap | None = None
        self._num_viewed = 0
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                size = format_bytes(path.stat().st_size)
                raise CapacityError(
                    f"{path}: {size} cannot be mapped into the memory that this process may have",
                    remedies=["ulimit -v unlimited", "a smaller model"],
                ) from error
            raise self.error(f"cannot be opened: {error.strerror or error}") from error
        except ValueError as error:
            raise self.error("is empty", remedies=("download it again",)) from error
        self._bytes: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)
        if self._map[: len(LFS_POINTER)] == LFS_POINTER:
            self.close()
            raise self.error("is a Git LFS pointer, not the weights", remedies=("git lfs pull",))

    @property
    def bytes(self) -> Bytes:
        """The whole file, uint8 [size], read-only."""
        assert self._bytes is not None, f"{self.path} has been closed"
        return self._bytes

    def view(self, begin: int, num_bytes: int) -> Bytes:
        """A tensor's bytes, uint8 [num_bytes], read-only. Raises WeightError for a file that has become shorter since
        it was opened: to touch what is gone would end the process."""
        if self._map is not None and begin + num_bytes > (size := self._map.size()):
            raise self.error(f"became shorter while it was read, and has {size} bytes now", remedies=_SHRUNK)
        data = self.bytes[begin : begin + num_bytes]
        if self._num_viewed > _RESIDENT_BYTES and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_viewed = 0
        self._num_viewed += num_bytes
        return data

    def error(self, what: str, *, tensor: str = "", remedies: tuple[str, ...] = ()) -> WeightError:
        """A WeightError that says `what` of this file (and tensor)."""
        subject = f"{self.path}: tensor {tensor} " if tensor else f"{self.path}: "
        return WeightError(subject + what, file=str(self.path), tensor=tensor, remedies=remedies)

    def close(self) -> None:
        """Let go of the mapping. Safe to call twice."""
        self._bytes = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                self._map = None  # tensors are still in use; the last one to go closes the mapping
