"""The training job's data: files, tokenizers, and the same global batch at any number of ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from onecopy.errors import SettingsError
from onecopy.recipes.config import Config
from onecopy.recipes.data import Batches, prepare
from onecopy.recipes.settings import load
from onecopy.recipes.texts import find_files, read_documents
from onecopy.recipes.tokenizer import ByteTokenizer, load_tokenizer
from onecopy.recipes.world import World
from ranks import run_ranks

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)


def in_a_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked process: pyarrow and tokenizers start threads, and other tests fork this one."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        run_ranks(1, lambda rank: test(**fixtures), group=False)

    return run


def write_parquet(path: Path, **columns: list[object]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def make_corpus(tmp_path: Path) -> Path:
    """One directory with all kinds of files; the documents are in order of their paths."""
    directory = tmp_path / "corpus"
    (directory / "b").mkdir(parents=True)
    (directory / "a.txt").write_text("first\nlines", encoding="utf-8")
    (directory / "b" / "rows.jsonl").write_text('{"text": "zweites ü"}\n\n{"text": "third", "n": 1}\n')
    write_parquet(directory / "c.parquet", n=[1, 2], text=["4", "5"])
    (directory / "ignored.md").write_text("not data")
    return directory


def settings(overrides: dict[str, object]) -> Config:
    return load(None, {"data.tokenizer": "bytes", **overrides})


# --- texts


@in_a_rank
def test_documents_of_a_directory(tmp_path: Path) -> None:
    assert list(read_documents([str(make_corpus(tmp_path))], "text")) == [
        "first\nlines",
        "zweites ü",
        "third",
        "4",
        "5",
    ]


@in_a_rank
def test_files_in_the_order_given(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    paths = [str(corpus / "c.parquet"), str(corpus / "a.txt")]
    assert [file.name for file in find_files(paths)] == ["c.parquet", "a.txt"]


@in_a_rank
def test_without_files_it_is_the_documentation_of_python() -> None:
    documents = list(read_documents([], "text"))
    assert len(documents) > 50
    assert any('The "with" statement' in document for document in documents)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.csv", "a,b", "must end in .txt, .jsonl, .parquet"),
        ("x.jsonl", '{"body": "a"}', "has no text in field 'text', but fields ['body']; set data.text_field"),
        ("x.jsonl", '{"text": "a"}\n{"text": 3}', "x.jsonl:2 has no text"),
        ("x.jsonl", '{"text": ', "x.jsonl:1 is not a line of JSON"),
        ("x.parquet", "nonsense", "is not a Parquet file"),
    ],
)
@in_a_rank
def test_files_that_are_not_what_they_should_be(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError) as raised:
        list(read_documents([str(tmp_path / name)], "text"))
    assert words in str(raised.value)


@in_a_rank
def test_text_that_is_not_utf8_and_columns_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        list(read_documents([str(tmp_path / "x.txt")], "text"))
    write_parquet(tmp_path / "x.parquet", n=[1])
    with pytest.raises(SettingsError, match=r"no column 'text' but \['n'\]"):
        list(read_documents([str(tmp_path / "x.parquet")], "text"))
    with pytest.raises(SettingsError, match="must hold text; found 1"):
        list(read_documents([str(tmp_path / "x.parquet")], "n"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"holds no \.txt"):
        find_files([str(tmp_path / "empty")])


# --- tokenizers


@in_a_rank
def test_bytes() -> None:
    assert [tokens.tolist() for tokens in ByteTokenizer().encode(["aü", ""])] == [[97, 0xC3, 0xBC], []]


@in_a_rank
def test_training_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    words = "low lower lowest " * 200
    (tmp_path / "text.txt").write_text(words)
    overrides = {
        "data.train": [str(tmp_path / "text.txt")],
        "data.tokenizer": "train",
        "data.vocabulary": 270,
        "data.sequence_length": 8,
        "data.batch": 4,
    }
    batches, validation, vocabulary = prepare(settings(overrides), ALONE, tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert 257 < vocabulary == len(saved) <= 270
    assert [batch["input_ids"].shape for batch in validation] == [(3, 8)]
    (micro_batch,) = next(iter(batches))
    assert all(saved.decode(row).strip() in words for row in micro_batch["input_ids"])

    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    sample = "lowest low, and ünïcode"
    (tokens,) = loaded.encode([sample])
    assert saved.decode(tokens) == sample
    assert saved.convert_ids_to_tokens(loaded.separator) == "<|endoftext|>"
    # It has learned the words: far fewer tokens than the 3,400 bytes.
    assert len(loaded.encode([words])[0]) < 1700


# --- batches


def sequences(count: int, length: int = 4) -> numpy.ndarray:
    return numpy.arange(count * length, dtype=numpy.uint16).reshape(count, length)


def steps(size: int, num_steps: int, *, batch: int = 12, accumulate: int = 1, seed: int = 7) -> torch.Tensor:
    """Which sequences are used: (step, rank, micro-batch, place)."""
    data = sequences(50)
    per_rank = []
    for rank in range(size):
        batches = iter(Batches(data, World(rank, rank, size, CPU), batch=batch, accumulate=accumulate, seed=seed))
        taken = [torch.stack([micro["input_ids"][:, 0] // 4 for micro in next(batches)]) for _ in range(num_steps)]
        per_rank.append(torch.stack(taken))
    return torch.stack(per_rank, 1)


@pytest.mark.parametrize("size, accumulate", [(2, 1), (3, 1), (4, 1), (2, 3), (3, 2), (1, 4), (12, 1)])
@in_a_rank
def test_the_global_batch_does_not_depend_on_the_ranks(size: int, accumulate: int) -> None:
    alone = steps(1, 9)
    spread = steps(size, 9, accumulate=accumulate)
    assert spread.shape == (9, size, accumulate, 12 // size // accumulate)
    for step in range(9):
        used = spread[step].flatten().tolist()
        assert sorted(used) == sorted(alone[step].flatten().tolist())


@in_a_rank
def test_ranks_share_no_sequence_and_an_epoch_takes_each_once() -> None:
    used = steps(2, 25, batch=10).flatten(1)
    for epoch in range(5):
        assert sorted(used[5 * epoch : 5 * epoch + 5].flatten().tolist()) == list(range(50))
    assert used[:5].flatten().tolist() != used[5:10].flatten().tolist()


@in_a_rank
def test_the_seed_decides() -> None:
    assert torch.equal(steps(2, 5), steps(2, 5))
    assert not torch.equal(steps(2, 5), steps(2, 5, seed=8))


@in_a_rank
def test_tokens_are_labels_and_sequences_do_not_overlap(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(32 + number % 90) for number in range(1000)))
    overrides = {
        "data.train": [str(text)],
        "data.sequence_length": 10,
        "data.batch": 90,
        "data.validation": [str(corpus / "a.txt"), str(corpus / "b")],
        "evaluation.evaluate_every": 0,
    }
    batches, validation, vocabulary = prepare(settings(overrides), ALONE, tmp_path)
    assert (validation, vocabulary) == ([], 257)
    ((batch,),) = [next(iter(batches))]
    assert torch.equal(batch["input_ids"], batch["labels"])
    starts = sorted((row - 32).tolist()[0] for row in batch["input_ids"])
    # 90 of the 100 sequences; each begins where a multiple of ten does.
    assert set(starts) <= {10 * number % 90 for number in range(100)}
    assert not list(tmp_path.glob("tokens-*"))


@in_a_rank
def test_validation_is_the_end_of_the_text_or_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a" * 900 + "b" * 99)
    base = {"data.train": [str(text)], "data.sequence_length": 5, "data.batch": 4}
    _, end, _ = prepare(settings({**base, "data.validation_fraction": 0.1}), ALONE, tmp_path)
    assert set(torch.cat([batch["input_ids"] for batch in end]).flatten().tolist()) == {ord("b")}
    (tmp_path / "own.txt").write_text("c" * 40)
    own = {**base, "data.validation": [str(tmp_path / "own.txt")]}
    _, end, _ = prepare(settings(own), ALONE, tmp_path)
    assert [batch["input_ids"].unique().tolist() for batch in end] == [[ord("c")], [ord("c")]]


@in_a_rank
def test_what_was_found_is_said(tmp_path: Path) -> None:
    """Oracle: the files that the test wrote."""
    corpus = make_corpus(tmp_path)
    (corpus / "z.txt").touch()
    base = {"data.train": [str(corpus)], "data.sequence_length": 3, "data.batch": 2, "schedule.steps": 6}
    said: list[str] = []
    prepare(settings({**base, "evaluation.evaluate_every": 0}), ALONE, tmp_path, said.append)
    # Bytes: 11, 10, 5, 1 and 1, and a separator after each; a twentieth is kept, so 32 make 10 sequences of 3.
    assert said == [
        "data: 3 files, 5 documents, 33 tokens; training takes 1.20 epochs of 10 sequences of 3 tokens",
        f"empty: {corpus / 'z.txt'}",
        f"not read, for their names end in none of .txt, .jsonl, .parquet: {corpus / 'ignored.md'}",
    ]
    with pytest.raises(SettingsError, match=r"nothing to train on; empty: .*z\.txt"):
        prepare(settings({**base, "data.train": [str(corpus / "z.txt")]}), ALONE, tmp_path)


@in_a_rank
def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    base = {"data.train": [str(tmp_path / "text.txt")]}
    with pytest.raises(SettingsError, match="makes 0 sequences of 128 tokens, fewer than the 16 of one step"):
        prepare(settings(base), ALONE, tmp_path)
    (tmp_path / "text.txt").write_text("long " * 500)
    with pytest.raises(SettingsError, match="validation text makes 0 sequences"):
        prepare(settings(base), ALONE, tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": ""}))
    with pytest.raises(SettingsError, match=r"nothing to train on; empty: .*rows\.jsonl"):
        prepare(settings({"data.train": [str(tmp_path / "rows.jsonl")]}), ALONE, tmp_path)


def test_hosts_with_different_texts_are_found(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"text{rank}.txt").write_text("word " * 1000 + "x" * rank)

    def two_hosts(rank: int) -> str:
        # Both are the first rank of their host.
        world = World(rank, 0, 2, CPU)
        directory = tmp_path / f"host{rank}"
        directory.mkdir()
        try:
            prepare(settings({"data.train": [str(tmp_path / f"text{rank}.txt")]}), world, directory)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing found"

    answers = run_ranks(2, two_hosts)
    assert answers[0] == answers[1]
    assert answers[0].startswith("MismatchError: every host must read the same text; found 4751 tokens")
