"""Data: the token stream, cut into sequences and dealt out to steps, ranks and micro-batches.

    tokens     |document·document·document·····························|document·······|
    sequences  |  0  |  1  |  2  |  3  | ... |  n-1  | (rest dropped)  |  validation   |

Which sequences make up step t depends on the seed and on t alone. Each rank takes its part of them, so that the global
batch is the same at any number of ranks, and no two ranks see the same sequence.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from onecopy.errors import MismatchError, SettingsError
from onecopy.recipes.config import Config
from onecopy.recipes.metrics import writing
from onecopy.recipes.texts import SUFFIXES, Found, read_documents
from onecopy.recipes.tokenizer import ByteTokenizer, Tokenizer, Tokens, load_tokenizer, train_tokenizer
from onecopy.recipes.world import World

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """Tokens that a host has written for its ranks.

    Attributes:
        vocabulary: how many different tokens there can be.
        dtype: numpy's name of the type of a token.
        num_train: tokens for training; those for validation follow.
        checksum: of all tokens.
        path: the file.
        found: what was read for training and validation.
    """

    vocabulary: int
    dtype: str
    num_train: int
    checksum: int
    path: Path
    found: Found = field(compare=False)


class Batches:
    """What one rank sees of the data. Each item is a step: its micro-batches, ready for the model.

    Args:
        sequences: tokens, one row a sequence.
        batch: sequences in a step, over all ranks and micro-batches.
        accumulate: micro-batches in a step.
        seed: of the order of the sequences, which is new in every epoch; None keeps theirs.
    """

    def __init__(self, sequences: Tokens, world: World, *, batch: int, accumulate: int, seed: int | None) -> None:
        self._sequences = sequences
        self._world = world
        self._batch = batch
        self._accumulate = accumulate
        self._seed = seed

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps without end."""
        return self.after(0)

    def after(self, steps: int) -> Iterator[list[Batch]]:
        """The same without the first ``steps``, of which nothing is read."""
        epoch, seen = divmod(steps * self._batch, len(self._sequences))
        epochs = itertools.chain.from_iterable(map(self._epoch, itertools.count(epoch)))
        order = itertools.islice(epochs, seen, None)
        while True:
            step = numpy.fromiter(itertools.islice(order, self._batch), numpy.int64, self._batch)
            parts = step.reshape(self._accumulate, self._world.size, -1)
            yield [self._load(part[self._world.rank]) for part in parts]

    def _epoch(self, number: int) -> NDArray[numpy.int64]:
        if self._seed is None:
            return numpy.arange(len(self._sequences))
        return numpy.random.default_rng([self._seed, number]).permutation(len(self._sequences))

    def _load(self, places: NDArray[numpy.int64]) -> Batch:
        tokens = torch.from_numpy(self._sequences[places].astype(numpy.int64)).to(self._world.device)
        return {"input_ids": tokens, "labels": tokens}


def prepare(
    config: Config, world: World, directory: Path, say: Callable[[str], None] | None = None
) -> tuple[Batches, list[Batch], int]:
    """Read and tokenize the text, once on each host.

    Args:
        directory: where the tokens lie until every rank has opened them, and a trained tokenizer stays.
        say: takes a line for people about what was found.

    Returns:
        Batches to train on; this rank's batches of an evaluation, none if it is switched off; the vocabulary's size.

    Raises:
        SettingsError: if the text cannot be read, or is too short for the settings.
        WriteError: if the tokens cannot be written.
        MismatchError: if two hosts have different texts.
    """
    writes = world.local_rank == 0 or world.is_new
    name = f"tokens-{os.getpid()}.bin" if world.is_new else f"tokens-{world.rank}.bin"
    own = _write_tokens(config, directory, name, again=world.is_new) if writes else None
    everyone = world.gather(own)
    prepared = everyone[world.rank - world.local_rank]
    assert prepared is not None
    written = [host for host in everyone if host is not None]
    if any(replace(host, path=prepared.path) != prepared for host in written):
        sizes = ", ".join(f"{host.num_train} tokens, checksum {host.checksum:08x}" for host in written)
        raise MismatchError(f"every host must read the same text; found {sizes}. Give all hosts the same files.")
    tokens = numpy.memmap(prepared.path, prepared.dtype, "r")
    world.gather(None)
    if writes:
        # The ranks have it open: its memory lives on until they end, and nothing is left behind.
        prepared.path.unlink()

    train = _sequences(tokens[: prepared.num_train], config)
    if len(train) < config.data.batch:
        raise SettingsError(
            f"the training text makes {len(train)} sequences of {config.data.sequence_length} tokens, fewer than the "
            f"{config.data.batch} of one step; give more text, or a smaller data.batch or data.sequence_length"
        )
    place = world.among_data(config.parallel.tensor)
    batches = Batches(
        train, place, batch=config.data.batch, accumulate=config.parallel.accumulate, seed=config.run.seed
    )
    validation = _sequences(tokens[prepared.num_train :], config)
    if say is not None:
        for line in _summary(config, prepared.found, len(tokens), len(train)):
            say(line)
    return batches, _evaluation_batches(validation, config, place), prepared.vocabulary


def _summary(config: Config, found: Found, tokens: int, sequences: int) -> Iterator[str]:
    """What was found, in a line; what was passed over, in one more for each kind."""
    source = f"{_plural(found.files, 'file')}" if config.data.train else "Python's own documentation"
    epochs = config.schedule.steps * config.data.batch / sequences
    yield (
        f"data: {source}, {_plural(found.documents, 'document')}, {_plural(tokens, 'token')}; training takes "
        f"{epochs:,.2f} epochs of {_plural(sequences, 'sequence')} of {config.data.sequence_length} tokens"
    )
    if found.empty:
        yield f"empty: {_first(found.empty)}"
    if found.ignored:
        yield f"not read, for their names end in none of {', '.join(SUFFIXES)}: {_first(found.ignored)}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _first(names: list[str], most: int = 3) -> str:
    """Some of the names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def _evaluation_batches(validation: Tokens, config: Config, world: World) -> list[Batch]:
    """This rank's part of the first batches of the validation text, as large as micro-batches in training."""
    if not config.evaluation.evaluate_every:
        return []
    # A short text makes one smaller batch, still of equal parts.
    size = min(config.data.batch // config.parallel.accumulate, len(validation) // world.size * world.size)
    if size == 0:
        raise SettingsError(
            f"the validation text makes {len(validation)} sequences of {config.data.sequence_length} tokens, fewer "
            f"than the {world.size} ranks; give more of it, or set evaluation.evaluate_every = 0"
        )
    count = min(config.evaluation.evaluate_batches, len(validation) // size)
    steps = Batches(validation, world, batch=size, accumulate=1, seed=None)
    return [micro_batches[0] for micro_batches in itertools.islice(steps, count)]


def _sequences(tokens: Tokens, config: Config) -> Tokens:
    length = config.data.sequence_length
    whole = len(tokens) // length
    return tokens[: whole * length].reshape(whole, length)


def _write_tokens(config: Config, directory: Path, name: str, *, again: bool = False) -> Prepared:
    """Tokenize all text into one file: what to train on, then what to validate on.

    Args:
        again: another rank of this run has done so before, and has left a tokenizer if it trained one.
    """
    data = config.data
    trained = directory / "tokenizer"
    tokenizer = load_tokenizer(str(trained)) if again and trained.is_dir() else make_tokenizer(config, directory)
    dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    path = directory / name
    checksum, found = 0, Found()
    with writing(path), path.open("wb") as file:

        def write(paths: list[str]) -> int:
            nonlocal checksum
            count = 0
            for tokens in _encode(read_documents(paths, data.text_field, found), tokenizer, dtype):
                file.write(tokens.data)
                checksum = zlib.crc32(tokens.data, checksum)
                count += len(tokens)
            return count

        num_train = write(data.train)
        if data.validation:
            write(data.validation)
        else:
            num_train -= int(num_train * data.validation_fraction)
    if num_train == 0:
        raise SettingsError(f"there is nothing to train on; empty: {_first(found.empty)}")
    return Prepared(tokenizer.vocabulary, dtype, num_train, checksum, path, found)


def make_tokenizer(config: Config, directory: Path) -> Tokenizer:
    """The tokenizer that the config asks for; one trained on the data is saved below ``directory``."""
    data = config.data
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer == "train":
        return train_tokenizer(read_documents(data.train, data.text_field), data.vocabulary, directory / "tokenizer")
    return load_tokenizer(data.tokenizer)


def _encode(documents: Iterator[str], tokenizer: Tokenizer, dtype: str) -> Iterator[Tokens]:
    """The documents' tokens, each document followed by the separator; some documents at a time."""
    while texts := list(itertools.islice(documents, 256)):
        for tokens in tokenizer.encode(texts):
            yield numpy.append(tokens.astype(dtype), numpy.array(tokenizer.separator, dtype))
