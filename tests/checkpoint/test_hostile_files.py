"""Checkpoints and model directories that a stranger wrote. What must hold: nothing is read or written outside of them,
nothing runs, nothing hangs or takes memory that the files do not have, and each is one sentence.

Every manifest here has the checksums of what it lists, as a stranger's would. Oracles: the file system around the
checkpoint, which must be as before, and the kernel's limit of memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import onecopy
from commands import command
from onecopy.checkpoint.deepspeed import import_deepspeed
from onecopy.checkpoint.export import export
from onecopy.checkpoint.inspect import inspect
from onecopy.errors import CheckpointError, DamagedCheckpointError, SettingsError
from onecopy.untrusted import Refused, parse_json, plain_name, printable
from places import FIXTURES
from ranks import run_ranks

NEWER, OLDER = "step-00000002", "step-00000001"
ROOM = 8 << 30
"""Bytes that a process may map while it reads; what is refused asks for more."""


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))


def _save(rank: int, directory: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        onecopy.save(directory, model, optimizer, step=step)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two") / "c"
    run_ranks(1, _save, directory, group=False)
    return directory


# --- a stranger's hand


def _sign(checkpoint: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> None:
    """Write a manifest that fits the files, and what ``change`` makes of it."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_bytes())
    body.pop("sha256")
    for name, entry in body["files"].items():
        file = checkpoint / name
        if file.is_file():
            entry.update(size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **body}))


def _manifest(**values: Any) -> Callable[[Path], None]:
    return lambda checkpoint: _sign(checkpoint, lambda body: body.update(values))


def _lists(name: str) -> Callable[[Path], None]:
    """The manifest lists one more file, of a private one's bytes."""

    def make(checkpoint: Path) -> None:
        content = (checkpoint.parent.parent / "private").read_bytes()
        entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        _sign(checkpoint, lambda body: body["files"].update({name: entry}))

    return make


def _linked(checkpoint: Path) -> None:
    (checkpoint / "asset-private").symlink_to(checkpoint.parent.parent / "private")
    _lists("asset-private")(checkpoint)


def _fifo(name: str) -> Callable[[Path], None]:
    def make(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)

    return make


def _file(name: str, content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def make(checkpoint: Path) -> None:
        path = checkpoint / name
        path.write_bytes(content(path.read_bytes()))
        _sign(checkpoint)

    return make


def _metadata(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def make(content: bytes) -> bytes:
        found = pickle.loads(content)
        change(found)
        return pickle.dumps(found)

    return _file(".metadata", make)


def _first_place(metadata: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(next(iter(metadata.storage_data.values())), name, value)


def _first_tensor(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.0.weight"]


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _bomb(content: bytes) -> bytes:
    """The same archive, with a compressed part of 128 MiB more."""
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data/9", "w") as part:
        for _ in range(8):
            part.write(bytes(1 << 24))
    return buffer.getvalue()


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


JOB: dict[str, Any] = {"aliases": {}, "objects": {}}
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    # names
    "an absolute asset": (_lists("asset-/tmp/onecopy-hostile"), "is not one beside it"),
    "an asset that forges lines": (_lists("asset-a\x1b[31mb\nFAKE"), "would forge lines"),
    "an asset of half a character": (_lists("asset-\ud800"), "half a character"),
    "an asset above": (_lists("asset-../../private"), "is not one beside it"),
    "an asset with a backslash": (_lists("asset-..\\private"), "is not one beside it"),
    "a file above": (_lists("../../private"), "is not one beside it"),
    "an endless name": (_lists("a" * 5000), "is no name"),
    "an asset that is a link": (_linked, "it is a link, and only plain files are read"),
    # kinds of files
    "a fifo as manifest": (_fifo("manifest.json"), "manifest.json cannot be used: it is a fifo"),
    "a fifo as metadata": (_fifo(".metadata"), "it is a fifo"),
    "a fifo as tensors": (_fifo("__0_0.distcp"), "it is a fifo"),
    # the manifest
    "a deep manifest": (lambda c: (c / "manifest.json").write_text("[" * 200_000), "more than 64 levels deep"),
    "a large manifest": (lambda c: os.truncate(c / "manifest.json", 1 << 40), "at most 67,108,864 are read"),
    "a list as manifest": (lambda c: (c / "manifest.json").write_text("[1]"), "it must hold a JSON object"),
    "a negative format": (_manifest(format=-5), "its format is -5"),
    "no format": (_manifest(format=None), "its format is None"),
    "words as sequence": (_manifest(sequence="x"), "sequence must be a number"),
    "an endless sequence": (_manifest(sequence=10**400), "sequence must be a number"),
    "a negative step": (_manifest(step=-1), "step must be a number"),
    "a step that is none": (_manifest(step=True), "step must be a number"),
    "a list of files": (_manifest(files=[]), "must be tables"),
    "nothing of a file": (_manifest(files={"a": 3}), "it must give size and sha256"),
    "no files": (_manifest(files={}), "file 'job.pt' is not listed"),
    "one key more": (_manifest(more=1), "it must have"),
    # what is no tensor
    "code in the job": (_file("job.pt", lambda _: _saved(Evil())), "it holds posix.system, which could run code"),
    "a compressed job": (_file("job.pt", _bomb), "parts of it are compressed"),
    "a deep job": (_file("job.pt", lambda _: _saved({**JOB, "extra": _nested(150)})), "64 levels deep"),
    "a list as job": (_file("job.pt", lambda _: _saved([1])), "it does not have the form that onecopy.save writes"),
    "numbers as aliases": (_file("job.pt", lambda _: _saved({**JOB, "aliases": {1: 2}})), "the form that onecopy.save"),
    "groups that are none": (_file("job.pt", lambda _: _saved({**JOB, "optimizer": {"groups": 3}})), "form that onec"),
    "a tensor of one byte": (
        _file("job.pt", lambda _: _saved({**JOB, "extra": torch.zeros(1).expand(1 << 50)})),
        "fewer bytes than its elements need",
    ),
    "an array of bytes": (_file("job.pt", lambda _: _saved({**JOB, "extra": bytearray(5)})), "bytearray"),
    "text as job": (_file("job.pt", lambda _: b"weights" * 99), "it is not what torch.save writes"),
    # metadata
    "code in metadata": (_file(".metadata", lambda _: pickle.dumps(Evil())), "it asks for posix.system"),
    "a place above": (_metadata(lambda m: _first_place(m, relative_path="../../private")), "not one beside it"),
    "a place that is missing": (_metadata(lambda m: _first_place(m, relative_path="nothing")), "No such file"),
    "a place beyond the end": (_metadata(lambda m: _first_place(m, length=1 << 40)), "beyond the end"),
    "a negative place": (
        _metadata(lambda m: _first_place(m, offset=-1)),
        "a number of bytes or elements is not a whole number",
    ),
    "words as a place": (
        _metadata(lambda m: _first_place(m, offset="x")),
        "a number of bytes or elements is not a whole number",
    ),
    "a tensor without pieces": (_metadata(lambda m: _first_tensor(m).chunks.clear()), "its pieces 0"),
    "a tensor of petabytes": (
        _metadata(lambda m: setattr(_first_tensor(m), "size", torch.Size([1 << 50, 8]))),
        "9007199254740992 elements",
    ),
    "a table of 64 GB for values": (
        _file(".metadata", lambda _: b"\x80\x04]r\xff\xff\xff\xff."),
        "numbers its values beyond their count",
    ),
    "a string of exabytes": (_file(".metadata", lambda _: b"\x80\x04\x8d" + b"\xff" * 8 + b"."), "is cut short"),
    "no metadata": (_file(".metadata", lambda _: pickle.dumps(torch.Size([3]))), "found Size"),
    "nothing": (_file(".metadata", lambda _: b""), "is cut short"),
}


def _around(directory: Path) -> dict[str, bytes]:
    """Everything beside a directory of checkpoints, by name."""
    return {
        str(path): path.read_bytes()
        for path in directory.parent.rglob("*")
        if path.is_file() and not path.is_relative_to(directory)
    }


def test_a_hostile_checkpoint_is_one_sentence_and_the_older_one_is_taken(two: Path, tmp_path: Path) -> None:
    """By load, inspect and export, all in a process that may not map more than 8 GiB."""
    cases = {}
    for number, (name, (make, words)) in enumerate(HOSTILE.items()):
        place = tmp_path / str(number)
        directory = shutil.copytree(two, place / "c")
        (place / "private").write_text("private")
        make(directory / NEWER)
        cases[name] = (directory, words, _around(directory))
    outside = set(Path("/tmp").glob("onecopy-hostile*"))

    def look(rank: int) -> list[str]:
        os.chdir(tmp_path)
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
        said = []
        for name, (directory, words, before) in cases.items():
            model = _model()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = onecopy.load(directory, model, torch.optim.AdamW(model.parameters()))
            assert loaded.path.name == OLDER, name
            (skipped,) = loaded.skipped
            assert words in skipped, (name, skipped)
            damage = {Path(one.path).name: one.damage for one in inspect(directory)}
            assert damage[OLDER] is None, name
            assert words in str(damage[NEWER]), (name, damage)
            with pytest.raises(DamagedCheckpointError) as caught:
                export(directory / NEWER, directory.parent / "out")
            said += [skipped, str(caught.value)]
            assert _around(directory) == before, name
            # It keeps nobody from saving.
            onecopy.save(directory, model, keep=1, extra="ours")
            assert onecopy.load(directory, model).extra == "ours", name
        return said

    for message in run_ranks(1, look, group=False, timeout=120)[0]:
        assert len(message.splitlines()) == 1
        assert len(message) < 1000
        assert "weights_only" not in message
        assert "Traceback" not in message
    assert not (tmp_path / "ran").exists()
    assert set(Path("/tmp").glob("onecopy-hostile*")) == outside


def test_assets_of_a_stranger_stay_inside_and_take_no_files_place(two: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(two, tmp_path / "c")
    for name in ("asset-", "asset-..", "asset-model.safetensors", "asset-model.safetensors.index.json"):
        (tmp_path / "private").write_text("private")
        (directory / NEWER / name).write_text("private")
        _lists(name)(directory / NEWER)

        def run(rank: int) -> None:
            with pytest.raises(DamagedCheckpointError, match=r"no name|not one beside it|which export itself writes"):
                export(directory / NEWER, tmp_path / "out")

        run_ranks(1, run, group=False)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(directory / NEWER)
        shutil.copytree(two / NEWER, directory / NEWER)


def test_links_are_not_followed_or_deleted_and_stop_no_save(two: Path, tmp_path: Path) -> None:
    """A link among the checkpoints, and links with the names of what a crash left: their targets stay as they are."""
    directory = shutil.copytree(two, tmp_path / "c")
    elsewhere = shutil.move(directory / NEWER, tmp_path / "elsewhere")
    (directory / NEWER).symlink_to(elsewhere)
    (directory / ".saving-step-00000003").symlink_to(elsewhere)
    (directory / ".removing-step-00000001").symlink_to(elsewhere)
    (directory / ".saving-step-00000004").write_text("a file")
    (tmp_path / ".exporting-out").symlink_to(elsewhere)

    def run(rank: int) -> tuple[str, ...]:
        model = _model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = onecopy.load(directory, model)
        assert loaded.path.name == OLDER
        assert "it is a link, and onecopy does not follow links" in loaded.skipped[0]
        assert onecopy.load(directory / NEWER, model).step == 2
        onecopy.save(directory, model, step=3, keep=1)
        onecopy.save(directory, model, step=2, keep=1)
        export(directory, tmp_path / "out")
        return tuple(sorted(path.name for path in directory.iterdir()))

    assert run_ranks(1, run, group=False)[0] == (".writer", "latest", NEWER, f"{NEWER}-2")
    assert {path.name for path in Path(elsewhere).iterdir()} == {path.name for path in (two / NEWER).iterdir()}
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_names_of_a_stranger_move_no_cursor(two: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(two, tmp_path / "c")
    _manifest(saved_by={"model": "\x1b[2J\x1b[1;1Hwhole\u202e"})(directory / NEWER)
    code, output, _ = command("inspect", str(directory / NEWER))
    assert code == 0
    assert "\x1b" not in output
    assert "\\x1b[2J" in output
    assert printable("a\tb\u2066") == "a\\x09b\\x2066"


# --- model directories


def _weights(directory: Path, name: str = "model.safetensors") -> Path:
    save_file({"a": torch.ones(4, 3)}, directory / name)
    return directory / name


def _index(directory: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "model.safetensors.index.json").write_text(text)


def _header(directory: Path, header: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + bytes(48))


def _tensor(**values: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48], **values}}).encode()


def _outside(directory: Path) -> Path:
    directory.with_name("outside").mkdir(exist_ok=True)
    return _weights(directory.with_name("outside"))


def _empty(path: Path) -> Path:
    path.mkdir()
    return path


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an index that names a path": (
        lambda d: (_outside(d), _index(d, {"weight_map": {"a": str(_outside(d))}})),
        "is not one beside it",
    ),
    "an index that goes up": (
        lambda d: (_outside(d), _index(d, {"weight_map": {"a": "../outside/model.safetensors"}})),
        "is not one beside it",
    ),
    "an index of numbers": (lambda d: _index(d, {"weight_map": {"a": 3}}), "which is no name"),
    "an index without a map": (lambda d: _index(d, [1]), "it must have an object weight_map"),
    "an index that is a list": (lambda d: _index(d, {"weight_map": ["a"]}), "it must have an object weight_map"),
    "a deep index": (lambda d: _index(d, "[" * 200_000), "more than 64 levels deep"),
    "an index that is a fifo": (lambda d: os.mkfifo(d / "model.safetensors.index.json"), "it is a fifo"),
    "weights that are a link": (lambda d: (d / "model.safetensors").symlink_to(_outside(d)), "it is a link"),
    "weights that lead nowhere": (lambda d: (d / "x.safetensors").symlink_to("nowhere"), "it is a link"),
    "weights that are a fifo": (lambda d: os.mkfifo(d / "model.safetensors"), "it is a fifo"),
    "weights that are a device": (lambda d: os.mknod(d / "model.safetensors", 0o20644, os.makedev(1, 5)), "a device"),
    "a header of exabytes": (lambda d: _header(d, b"{}", (1 << 63) - 1), "its header claims"),
    "a deep header": (lambda d: _header(d, b"[" * 200_000), "more than 64 levels deep"),
    "a header that is a list": (lambda d: _header(d, b"[1]"), "its header must hold a JSON object"),
    "a tensor beyond the end": (lambda d: _header(d, _tensor(data_offsets=[0, 96])), "reaches beyond the file"),
    "a tensor of petabytes": (lambda d: _header(d, _tensor(shape=[1 << 50])), "reaches beyond the file"),
    "a negative shape": (lambda d: _header(d, _tensor(shape=[-4, -3])), "reaches beyond the file"),
    "a shape that is none": (lambda d: _header(d, _tensor(shape="43")), "reaches beyond the file"),
    "parts that are none": (
        lambda d: save_file({"a": torch.ones(4, 3)}, d / "model.safetensors", {"DCP_SHARDING_INFO": "[" * 100_000}),
        "more than 64 levels deep",
    ),
    "parts of nothing": (
        lambda d: save_file({"a": torch.ones(4, 3)}, d / "model.safetensors", {"DCP_SHARDING_INFO": "{}"}),
        "it does not say which part",
    ),
}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 3))


def test_a_hostile_model_directory_is_one_sentence(tmp_path: Path) -> None:
    cases = {}
    for number, (name, (make, words)) in enumerate(MODELS.items()):
        directory = tmp_path / str(number) / "model"
        directory.mkdir(parents=True)
        try:
            make(directory)
        except PermissionError:
            assert name == "weights that are a device", name
            continue
        cases[name] = (directory, words)

    def look(rank: int) -> list[str]:
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
        said = []
        for name, (directory, words) in cases.items():
            model = One()
            with pytest.raises(CheckpointError) as caught:
                onecopy.load_pretrained(model, directory)
            assert words in str(caught.value), (name, str(caught.value))
            assert not model.a.any(), name
            said.append(str(caught.value))
        return said

    for message in run_ranks(1, look, group=False)[0]:
        assert len(message.splitlines()) == 1


def test_a_cache_of_the_hub_loads_though_all_its_names_are_links(tmp_path: Path) -> None:
    """Its layout: snapshots/<revision>/<name> leads to blobs/<checksum>; a link to elsewhere is still refused."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shutil.move(_weights(blobs), blobs / "5678")
    (snapshot / "model.safetensors").symlink_to("../../blobs/5678")

    def run(rank: int) -> None:
        assert torch.equal(onecopy.load_pretrained(One(), snapshot).a, torch.ones(4, 3))
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(_weights(tmp_path))
        with pytest.raises(CheckpointError, match="it is a link"):
            onecopy.load_pretrained(One(), snapshot)

    run_ranks(1, run, group=False)


# --- DeepSpeed's


def _model_states(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def make(source: Path) -> None:
        path = source / "global_step2" / "mp_rank_00_model_states.pt"
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    return make


def _fifo_at(name: str) -> Callable[[Path], object]:
    return lambda source: ((source / name).unlink(), os.mkfifo(source / name))


STATES = "global_step2/mp_rank_00_model_states.pt"
DEEPSPEED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tag above": (lambda s: (s / "latest").write_text("../elsewhere"), "is not one beside it"),
    "an absolute tag": (lambda s: (s / "latest").write_text("/etc"), "is not one beside it"),
    "a fifo as latest": (_fifo_at("latest"), "it is a fifo"),
    "a fifo as states": (_fifo_at(STATES), "it is a fifo"),
    "a link as states": (
        lambda s: ((s / STATES).rename(s / "elsewhere"), (s / STATES).symlink_to(s / "elsewhere")),
        "it is a link",
    ),
    "compressed states": (lambda s: (s / STATES).write_bytes(_bomb((s / STATES).read_bytes())), "are compressed"),
    "a list": (lambda s: torch.save([1], s / STATES), "found list"),
    "no shapes": (_model_states(lambda m: m.pop("param_shapes")), "there is no 'param_shapes'"),
    "shapes that are none": (_model_states(lambda m: m.update(param_shapes=3)), "does not hold what DeepSpeed writes"),
    "a shape of petabytes": (
        _model_states(
            lambda m: m["param_shapes"][0].update(dict.fromkeys(m["param_shapes"][0], torch.Size([1 << 50])))
        ),
        "elements in DeepSpeed's files",
    ),
    "words as steps": (_model_states(lambda m: m.update(global_steps="x")), "does not hold what DeepSpeed writes"),
    "negative steps": (_model_states(lambda m: m.update(global_steps=-3)), "from 0 to 2**53; found -3"),
    "words as module": (_model_states(lambda m: m.update(module={"a": "b"})), "does not hold what DeepSpeed writes"),
}


def test_a_hostile_checkpoint_of_deepspeed_is_one_sentence(tmp_path: Path) -> None:
    cases = {}
    for number, (name, (make, words)) in enumerate(DEEPSPEED.items()):
        source = shutil.copytree(FIXTURES / "deepspeed-stage2", tmp_path / str(number) / "source")
        make(source)
        cases[name] = (source, words)

    def look(rank: int) -> list[str]:
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
        said = []
        for name, (source, words) in cases.items():
            with pytest.raises(CheckpointError) as caught:
                import_deepspeed(source, source.with_name("out"))
            assert words in str(caught.value), (name, str(caught.value))
            said.append(str(caught.value))
        return said

    for message in run_ranks(1, look, group=False)[0]:
        assert len(message.splitlines()) == 1
        assert "weights_only" not in message


# --- the parts


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", 3, None, "é" * 128])
def test_what_is_no_plain_name(name: object) -> None:
    with pytest.raises(Refused):
        plain_name(name)


def test_depth_is_counted_outside_of_strings() -> None:
    assert parse_json(json.dumps({"a": "[" * 1000, 'b"[': "\\["}).encode()) == {"a": "[" * 1000, 'b"[': "\\["}
    assert parse_json(b"[" * 64 + b"]" * 64)
    with pytest.raises(Refused, match="levels deep"):
        parse_json(b"[" * 65 + b"]" * 65)
    with pytest.raises(Refused, match="not JSON"):
        parse_json(b'{"a')


def test_settings_of_strangers_are_one_sentence_too(tmp_path: Path) -> None:
    """A model's config.json, DeepSpeed's settings and a run directory, each of 200,000 brackets."""
    from onecopy.integrations.deepspeed import from_deepspeed
    from onecopy.recipes.checks import check, resolve
    from onecopy.recipes.settings import load
    from onecopy.report.run import read_run

    deep = "[" * 200_000
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(SettingsError, match="levels deep"):
        check(resolve(load(None, {"model.path": str(tmp_path / "config.json"), "parallel.device": "cpu"})))
    with pytest.raises(SettingsError, match="levels deep"):
        from_deepspeed(tmp_path / "config.json")
    (tmp_path / "metrics.jsonl").write_text(deep)
    (tmp_path / "summary.json").write_text(deep)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-0.json").write_text(deep)
    run = read_run(tmp_path)
    assert "levels deep" in run.notes["summary"]
    assert "levels deep" in run.notes["trace"]
    assert "1 line(s)" in run.notes["metrics"]
