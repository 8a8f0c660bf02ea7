"""Write a tokenizer with one token for each printable ASCII character, as a Hugging Face folder.

    python examples/char_tokenizer.py FOLDER

For models that are trained from scratch on short tasks.
"""

from __future__ import annotations

import sys
from pathlib import Path


def write_char_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the number of tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    return len(fast)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(f"{write_char_tokenizer(Path(sys.argv[1]))} tokens in {sys.argv[1]}")
