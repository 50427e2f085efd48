"""Weight source `gguf`: a .gguf file, converted once into a folder of safetensors and JSON.

The folder lies in the cache, belongs to the user alone, and is named after the file's path, size
and time of change, so that a file that changed is converted anew. Whoever writes holds a lock that
ends with its process: others wait, and what a killed one has left is known as such and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts import NoOptions
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.envvars import CACHE_DIR
from octavo.core.errors import ModelError, ModelNotFound, WeightError
from octavo.models.json_files import read_json
from octavo.models.weight_sources.folder import SINGLE
from octavo.models.weight_sources.gguf_metadata import (
    GGUF,
    make_config,
    make_generation_config,
)
from octavo.models.weight_sources.gguf_tensors import content, convertible, tensor_header
from octavo.models.weight_sources.gguf_tokenizer import tokenizer_files
from octavo.models.weight_sources.safetensors_files import (
    is_complete,
    partial_files,
    progress_bar,
    read_tensors,
    write_tensors,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CONVERSION = 2
"""Counts up when the conversion changes, so that older results are not used."""


class GGUFFile(WeightSource):
    """`config` and the tokenizer files are converted when first asked for, weights when first
    loaded."""

    def __init__(self, options: NoOptions, context: WeightSourceContext) -> None:
        self._show_progress = context.show_progress
        self._cache = context.cache_dir / "gguf"
        self.path = Path(context.source).expanduser()
        if not self.path.is_file():
            raise ModelNotFound(f"no such file: '{context.source}'")

    def config(self) -> dict[str, Any]:
        return read_json(self._folder / "config.json")

    def generation_config(self) -> dict[str, Any]:
        return read_json(self._folder / "generation_config.json")

    def tokenizer_dir(self) -> Path | None:
        return self._folder if (self._folder / "tokenizer.json").is_file() else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        file = self._folder / SINGLE
        if partial_files(file) or not is_complete(file):
            self._convert_weights(file)
        return read_tensors([file], self._show_progress)

    @cached_property
    def _file(self) -> GGUF:
        return GGUF(self.path)

    @cached_property
    def _folder(self) -> Path:
        """The converted folder, with everything but perhaps the weights."""
        where = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        stat = self.path.stat()
        what = f"{_CONVERSION} {stat.st_size} {stat.st_mtime_ns}"
        version = hashlib.sha256(what.encode()).hexdigest()[:16]
        folder = self._cache / f"{where}-{version}"
        if not _has_texts(folder):
            texts = self._texts()
            with self._writing("the converted model"):
                make_private(self._cache)
                with _locked(self._cache) as held:
                    if not _has_texts(folder):
                        self._write_texts(folder, where, held, texts)
        return folder

    def _write_texts(self, folder: Path, where: str, locked: bool, texts: dict[str, str]) -> None:
        """Put the texts in place, all at once where the folder is new. Remove what earlier versions
        of the file have left and, under the lock, what processes have that were killed."""
        left = list(self._cache.glob(f"{_PARTIAL}*")) if locked else []
        for old in [*self._cache.glob(f"{where}-*"), *left]:
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._cache))
        try:
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
            if not folder.is_dir():
                partial.rename(folder)
            else:
                logger.warning("%s: damaged; its texts are converted anew", folder)
                for name in texts:
                    (partial / name).replace(folder / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _texts(self) -> dict[str, str]:
        values = {
            "config.json": make_config(self._file),
            "generation_config.json": make_generation_config(self._file),
        }
        values |= tokenizer_files(self._file)
        return {
            name: json.dumps(value, ensure_ascii=False, indent=None if "tokenizer." in name else 1)
            for name, value in values.items()
        }

    def _convert_weights(self, file: Path) -> None:
        """Convert what is not there, or damaged; remove what killed processes have left."""
        with contextlib.ExitStack() as stack:
            try:
                if stack.enter_context(_locked(file.parent)):
                    for left in partial_files(file):
                        left.unlink()
            except OSError as error:
                if is_complete(file):  # in a cache that can only be read
                    logger.debug("%s: what is left there stays: %s", file.parent, error)
                    return
                raise self._unwritable("the converted weights", error) from error
            if is_complete(file):
                return
            if file.exists():
                logger.warning("%s: truncated or damaged; it is converted anew", file)
            self._write_weights(file)

    def _write_weights(self, file: Path) -> None:
        tensors = convertible(self._file)
        headers = [tensor_header(self._file, tensor) for tensor in tensors]
        names = [header.name for header in headers]
        if len(set(names)) != len(names):
            raise WeightError(f"{self.path}: two tensors have one name")
        total = sum(header.nbytes for header in headers)
        logger.info("converting %s into %s, %d MB", self.path, file.parent, total // 2**20)
        with progress_bar("Converting weights", total, self._show_progress) as bar:

            def contents() -> Iterator[Any]:
                for tensor in tensors:
                    values = content(self._file, tensor)
                    yield values
                    bar.update(values.nbytes)

            with self._writing(f"{total // 2**20} MB of converted weights"):
                write_tensors(file, headers, contents())

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unwritable(what, error) from error

    def _unwritable(self, what: str, error: OSError) -> ModelError:
        return ModelError(
            f"{self.path}: cannot write {what} into the cache: {error}; make {self._cache} "
            f"writable, with room, or set {CACHE_DIR.name} to another folder"
        )


_PARTIAL = ".partial-"


def _has_texts(folder: Path) -> bool:
    """Whether a folder has its JSON files, none of them cut short."""
    if not (folder / "config.json").is_file():
        return False
    return all(file.read_bytes()[-2:].rstrip()[-1:] == b"}" for file in folder.glob("*.json"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, which ends with the process. False: this file system knows no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter; refuse one of another user, whose weights and
    tokenizer would be trusted."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner != os.getuid():
        raise PermissionError(f"{folder} belongs to user {owner}, not to user {os.getuid()}")
    folder.chmod(0o700)
