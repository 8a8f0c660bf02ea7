"""ModelFiles: what belongs to a model's folder beside its weights and its architecture, one rule for every path.

    config.json               bos, eos and pad token ids (the rest of it is hf_config.py's)
    generation_config.json    overrides them where text is generated; may be missing
    tokenizer files           with the chat template

A Hugging Face folder holds them. A Megatron checkpoint has no place for them: a folder `huggingface` stands beside it,
which is a Hugging Face folder without weights.
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
_FURTHER_TEMPLATES = "additional_chat_templates"  # one file for each, where transformers 5 writes more than one

TokenIds = int | list[int] | None


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What one folder says."""

    folder: Path  # for messages: who says where a response ends
    tokens: dict[str, TokenIds]  # TOKEN_FIELDS, as transformers reads them from config.json
    generation: dict[str, Any] | None  # None: there is no generation_config.json, and config.json alone counts
    tokenizer: dict[str, Path]  # name in a model's folder -> file; empty where there is none

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a response: generation_config.json's where it names any, else config.json's."""
        named = (self.generation or {}).get("eos_token_id")
        return as_list(self.tokens["eos_token_id"] if named is None else named)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a vocabulary among the files."""
        return any(name in self.tokenizer for name in _VOCABULARIES)

    def with_tokenizer(self, folder: str | Path) -> ModelFiles:
        """The same model with the tokenizer of another folder."""
        return dataclasses.replace(self, tokenizer=_tokenizer_files(Path(folder)))

    def require_tokenizer(self, folder: str | Path, flag: str) -> None:
        """CheckpointError, which names the flag, where there is no tokenizer."""
        if not self.has_tokenizer:
            raise CheckpointError(f"{folder} holds no Hugging Face tokenizer; set {flag} to a folder that does.")

    def laid_out(self, config: dict[str, Any]) -> dict[str, Path | str]:
        """Name -> file to copy or text, of a folder without weights; config.json is last: nothing loads without it.

        Args:
            config: the fields of config.json, whose token ids become this model's.
        """
        entries: dict[str, Path | str] = dict(self.tokenizer)
        if self.generation is not None:
            entries[GENERATION] = _text(self.generation)
        return {**entries, CONFIG: _text(config | self.tokens)}


def read_model_folder(folder: str | Path) -> ModelFiles:
    """What a Hugging Face folder with a config.json says.

    Raises:
        CheckpointError: config.json or generation_config.json is missing, damaged or names tokens that are no numbers.
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
    """What a folder says that is chosen for its tokenizer: a model's, or a tokenizer alone, whose own tokens count.

    Args:
        folder: with the tokenizer's files.
        tokenizer: the same, loaded; None loads it where it is needed.
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
    """What stands beside a Megatron checkpoint, in the first of these folders that holds it; None where none does."""
    for place in places:
        if (Path(place) / RECORD / CONFIG).is_file():
            return read_model_folder(Path(place) / RECORD)
    return None


def with_chosen_tokenizer(record: ModelFiles | None, folder: str | Path | None) -> ModelFiles | None:
    """A checkpoint's files with the tokenizer that was asked for, whose folder also says the rest where no record does.

    Args:
        record: what stands beside the checkpoint.
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
    """The tokenizer; CheckpointError where transformers cannot load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers package raises plain Exception
        words = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"The tokenizer of {folder} cannot be loaded ({type(error).__name__}: {words})."
        ) from error


def write_folder(target: str | Path, entries: dict[str, Path | str]) -> None:
    """Write what `laid_out` gives into a folder of its own; each file is whole or untouched, and what belongs to such a
    folder but not to this model is removed. Call it on one rank."""
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
    """The same into a conversion's output, in a folder of this name there."""
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
    """Token ids as config files write them: a number, several, or none."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    further = sorted((folder / _FURTHER_TEMPLATES).glob("*.jinja"))
    files = [folder / name for name in _TOKENIZER_FILES]
    return {str(file.relative_to(folder)): file for file in [*files, *further] if file.is_file()}


def _class_defaults(model_type: Any) -> dict[str, TokenIds]:
    """What transformers takes for a field that config.json leaves out: the class of the model says."""
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
