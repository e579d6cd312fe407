"""Tokenizer: text to token numbers, by bytes, by one trained on the data, or by a model's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy
from numpy.typing import NDArray

from onecopy.errors import SettingsError

Tokens = NDArray[numpy.integer]

_SEPARATOR: Final = "<|endoftext|>"
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_MORE_FILES: Final = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")


class Tokenizer(Protocol):
    """What the data needs.

    Attributes:
        vocabulary: how many tokens there are.
        separator: the token that ends a document.
    """

    vocabulary: int
    separator: int

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without separators."""
        ...


class ByteTokenizer:
    """The 256 byte values of UTF-8, and a separator."""

    vocabulary = 257
    separator = 256

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [numpy.frombuffer(text.encode("utf-8"), numpy.uint8) for text in texts]


class PretrainedTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, separator: int) -> None:
        self.vocabulary = len(tokenizer)
        self.separator = separator
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        # Not verbose: it would warn of documents longer than a sequence, which are cut later.
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [numpy.array(tokens, numpy.uint32) for tokens in encoded["input_ids"]]


def has_tokenizer(directory: str) -> bool:
    """Whether a directory holds a tokenizer of transformers."""
    return any((Path(directory) / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_files(directory: str) -> list[Path]:
    """What there is of a tokenizer in a directory; nothing if it is none."""
    return [path for name in (*TOKENIZER_FILES, *_MORE_FILES) if (path := Path(directory) / name).is_file()]


def load_tokenizer(directory: str) -> PretrainedTokenizer:
    """The tokenizer of a local directory.

    Raises:
        SettingsError: if it has no token to end a document with.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise SettingsError(f"the tokenizer in {directory!r} must have an eos_token, to end documents with; set one")
    return PretrainedTokenizer(tokenizer, tokenizer.eos_token_id)


def train_tokenizer(documents: Iterable[str], vocabulary: int, directory: Path) -> PretrainedTokenizer:
    """Byte-level BPE trained on ``documents``, saved to ``directory`` as transformers loads it.

    Args:
        vocabulary: the most tokens it may have; 257 are bytes and the separator. A short text yields fewer.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast: Any = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(documents, trainer)
    pretrained: Any = PreTrainedTokenizerFast
    tokenizer = pretrained(tokenizer_object=fast, eos_token=_SEPARATOR)
    tokenizer.save_pretrained(directory)
    return PretrainedTokenizer(tokenizer, fast.token_to_id(_SEPARATOR))
