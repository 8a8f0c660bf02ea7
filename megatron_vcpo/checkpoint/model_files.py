"""ModelFiles: what belongs to a model's folder besides weights and architecture. Every code path uses the same rules.

    config.json               bos, eos and pad token ids (hf_config.py has the rest)
    generation_config.json    overrides them in generation; may be missing
    tokenizer files           including the chat template

A Hugging Face folder holds them. A Megatron checkpoint has no place for them, so a folder `huggingface` beside it holds
them: a Hugging Face folder without weights.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vcpo.checkpoint.partial_folder import PartialFolder
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.runtime.files import replace_bytes

RECORD = "huggingface"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = (
    *_VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_FURTHER_TEMPLATES = "additional_chat_templates"  # transformers 5 writes one file for each further template

TokenIds = int | list[int] | None


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What one folder says about end tokens, generation and tokenizer."""

    folder: Path  # for messages: the folder that says where a response ends
    tokens: dict[str, TokenIds]  # TOKEN_FIELDS, as transformers reads them from config.json
    generation: dict[str, Any] | None  # None: without generation_config.json, config.json alone counts
    tokenizer: dict[str, Path]  # name in a model's folder -> file; empty if there is none

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a response: generation_config.json's if it names any, else config.json's."""
        named = (self.generation or {}).get("eos_token_id")
        return as_list(self.tokens["eos_token_id"] if named is None else named)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files include a vocabulary."""
        return any(name in self.tokenizer for name in _VOCABULARIES)

    def with_tokenizer(self, folder: str | Path) -> ModelFiles:
        """The same model with the tokenizer of another folder."""
        return dataclasses.replace(self, tokenizer=_tokenizer_files(Path(folder)))

    def require_tokenizer(self, folder: str | Path, flag: str) -> None:
        """Raise CheckpointError, naming the flag, if there is no tokenizer."""
        if not self.has_tokenizer:
            raise CheckpointError(f"{folder} holds no Hugging Face tokenizer; set {flag} to a folder that does.")

    def laid_out(self, config: dict[str, Any]) -> dict[str, Path | str]:
        """Name -> file to copy, or text, for a folder without weights. config.json is last: nothing loads without it.

        Args:
            config: the fields of config.json, whose token ids become this model's.
        """
        entries: dict[str, Path | str] = dict(self.tokenizer)
        if self.generation is not None:
            entries[GENERATION] = _text(self.generation)
        return {**entries, CONFIG: _text(config | self.tokens)}


def read_model_folder(folder: str | Path) -> ModelFiles:
    """Read a Hugging Face folder that has a config.json.

    Raises:
        CheckpointError: config.json is missing, or it or generation_config.json is damaged or has token ids that are
            not integers.
    """
    path = Path(folder)
    config, generation = _read_json(path / CONFIG), None
    if (path / GENERATION).is_file():
        generation = _read_json(path / GENERATION)
        _check_tokens(path / GENERATION, generation)
    _check_tokens(path / CONFIG, config)
    defaults = _class_defaults(config.get("model_type"))
    tokens = {field: config.get(field, defaults[field]) for field in TOKEN_FIELDS}
    return ModelFiles(folder=path, tokens=tokens, generation=generation, tokenizer=_tokenizer_files(path))


def read_tokenizer_folder(folder: str | Path, tokenizer: Any | None = None) -> ModelFiles:
    """Read a folder that was chosen for its tokenizer: a model's folder, or a tokenizer alone, whose own tokens then
    count.

    Args:
        folder: holds the tokenizer's files.
        tokenizer: the loaded tokenizer; None loads it if needed.
    """
    path = Path(folder)
    if (path / CONFIG).is_file():
        return read_model_folder(path)
    loaded = load_tokenizer(path) if tokenizer is None else tokenizer
    tokens: dict[str, TokenIds] = {field: getattr(loaded, field) for field in TOKEN_FIELDS}
    generation = _read_json(path / GENERATION) if (path / GENERATION).is_file() else None
    _check_tokens(path / GENERATION, generation or {})
    return ModelFiles(folder=path, tokens=tokens, generation=generation, tokenizer=_tokenizer_files(path))


def read_record(*places: str | Path) -> ModelFiles | None:
    """The record beside a Megatron checkpoint, from the first of these folders that has one; None if none has."""
    for place in places:
        if (Path(place) / RECORD / CONFIG).is_file():
            return read_model_folder(Path(place) / RECORD)
    return None


def with_chosen_tokenizer(record: ModelFiles | None, folder: str | Path | None) -> ModelFiles | None:
    """A checkpoint's files with the chosen tokenizer; without a record, the tokenizer's folder provides everything.

    Args:
        record: from `read_record`.
        folder: given as --tokenizer, or None.

    Raises:
        CheckpointError: the folder holds no tokenizer.
    """
    if folder is None:
        return record
    chosen = read_tokenizer_folder(folder)
    chosen.require_tokenizer(folder, "--tokenizer")
    return chosen if record is None else record.with_tokenizer(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer; CheckpointError if transformers cannot load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers package raises plain Exception
        words = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"The tokenizer of {folder} cannot be loaded ({type(error).__name__}: {words})."
        ) from error


def write_folder(target: str | Path, entries: dict[str, Path | str]) -> None:
    """Write the result of `laid_out` into a folder of its own. Every file is written whole or left unchanged; files of
    another model's folder are removed. Call it on one rank only."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    old = {*_tokenizer_files(folder), GENERATION}
    for name in old - entries.keys():
        (folder / name).unlink(missing_ok=True)
    for name, entry in entries.items():
        content = entry.read_bytes() if isinstance(entry, Path) else entry.encode()
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(exist_ok=True)
        replace_bytes(path, content)


def write_into(folder: PartialFolder, entries: dict[str, Path | str], *, under: str = "") -> None:
    """Write the result of `laid_out` into a conversion's output, below the folder `under` if given."""
    for name, entry in entries.items():
        with folder.file(str(Path(under) / name)) as part:
            if isinstance(entry, Path):
                shutil.copyfile(entry, part.path)
            else:
                part.path.write_text(entry)


def fingerprint(files: ModelFiles | None) -> Iterator[Path]:
    """The files that `files` was read from."""
    if files is not None:
        yield from (files.folder / name for name in (CONFIG, GENERATION) if (files.folder / name).is_file())
        yield from files.tokenizer.values()


def as_list(ids: TokenIds) -> list[int]:
    """Token ids as config files write them (a number, a list or nothing) as a list."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    further = sorted((folder / _FURTHER_TEMPLATES).glob("*.jinja"))
    files = [folder / name for name in _TOKENIZER_FILES]
    return {str(file.relative_to(folder)): file for file in [*files, *further] if file.is_file()}


def _class_defaults(model_type: Any) -> dict[str, TokenIds]:
    """transformers' values for fields that config.json leaves out, which depend on the model's class."""
    from transformers import CONFIG_MAPPING

    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    config = CONFIG_MAPPING[model_type]() if known else None
    return {field: getattr(config, field, None) for field in TOKEN_FIELDS}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the model's folder again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object; copy the model's folder again.")
    return content


def _check_tokens(path: Path, fields: dict[str, Any]) -> None:
    for field in TOKEN_FIELDS:
        value = fields.get(field)
        several = value if isinstance(value, list) and value else [value]
        if value is not None and not all(type(token) is int for token in several):
            raise CheckpointError(
                f"{path} holds {field} {str(value)[:60]!r}, which is neither a token's number nor a list of such; "
                "mend the file."
            )


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"
