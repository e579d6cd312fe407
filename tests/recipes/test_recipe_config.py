"""The training job's config: reading, errors that name what is near, writing, and settings that cannot work."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from onecopy.errors import SettingsError
from onecopy.recipes.checks import check, resolve
from onecopy.recipes.config import Config
from onecopy.recipes.settings import dump, keys, load


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_key_is_described_and_its_name_is_unique() -> None:
    assert all(len(key.field.description or "") > 10 for key in keys())
    names = [key.name for key in keys()]
    assert len(set(names)) == len(names)


def test_file_then_options(tmp_path: Path) -> None:
    path = write(tmp_path, "[parallel]\nstage = 1\nranks = 4\n[data]\ntrain = ['a.txt']\n")
    config = load(path, {"parallel.stage": "2", "optimizer.learning_rate": "3e-4", "run.tensorboard": "false"})
    assert (config.parallel.stage, config.parallel.ranks) == (2, 4)
    assert config.data.train == ["a.txt"]
    assert config.optimizer.learning_rate == 3e-4
    assert config.run.tensorboard is False


def test_defaults_survive_being_printed() -> None:
    assert Config.model_validate(tomllib.loads(dump(Config()))) == Config()


def test_odd_values_survive_being_printed(tmp_path: Path) -> None:
    awkward = 'a "quoted"\\path\twith ünïcode \x7f\n'
    config = load(None, {"data.train": [awkward, "b"], "optimizer.eps": 1e-12, "parallel.ranks": 3})
    assert load(write(tmp_path, dump(config)), {}) == config


def test_every_key_is_printed_below_its_description() -> None:
    lines = dump(Config()).splitlines()
    for key in keys():
        (place,) = [number for number, line in enumerate(lines) if line.startswith(f"{key.name} = ")]
        comment = []
        while lines[place - 1].startswith("# "):
            place -= 1
            comment.insert(0, lines[place][2:])
        assert " ".join(comment) == key.field.description


@pytest.mark.parametrize(
    "text, wrong, near",
    [
        ("[model]\nlayer = 3", "model.layer", "'model.layers'"),
        ("[optimiser]\neps = 1e-8", "optimiser", "[optimizer]"),
        ("[optimizer]\nsteps = 3", "optimizer.steps", "'schedule.steps'"),
        ("[optimizer]\nlr_rate = 3", "optimizer.lr_rate", "'optimizer.learning_rate'"),
        ("stage = 3", "stage", "'parallel.stage'"),
        ("[run]\nsede = 3", "run.sede", "'run.seed'"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, text: str, wrong: str, near: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(write(tmp_path, text), {})
    assert f"unknown key '{wrong}'" in str(raised.value)
    assert str(raised.value).endswith(f"; did you mean {near}?")


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"parallel.stage": "4"}, ["parallel.stage", "must be 0", "found 4"]),
        ({"schedule.steps": "many"}, ["schedule.steps", "'many'"]),
        ({"schedule.steps": "0"}, ["schedule.steps must be at least 1; found '0'"]),
        ({"optimizer.beta1": "1"}, ["optimizer.beta1 must be below 1; found '1'"]),
        ({"data.batch": "1.5"}, ["data.batch must be a whole number; found '1.5'"]),
        ({"run.tensorboard": "maybe"}, ["run.tensorboard must be true or false; found 'maybe'"]),
        ({"data.train": "a.txt"}, ["data.train must be a list of texts; found 'a.txt'"]),
        ({"parallel.ranks": "few"}, ["parallel.ranks must be a whole number or 'auto'; found 'few'"]),
        ({"parallel.precision": "fp8"}, ["parallel.precision", "'fp32', 'bf16' or 'bf16-lean'", "'fp8'"]),
        ({"optimizer.learning_rate": "nan"}, ["optimizer.learning_rate", "finite"]),
        ({"schedule.steps": "0", "model.heads": "-1"}, ["schedule.steps", "model.heads"]),
    ],
)
def test_wrong_value_is_named(overrides: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        load(None, overrides)
    for word in words:
        assert word in str(raised.value)
    assert "nput should" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == len(overrides)


def test_weights_without_their_tokenizer_are_refused_and_a_config_alone_takes_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 128}')
    alone = resolve(load(None, {"parallel.device": "cpu", "model.path": str(tmp_path / "config.json")}))
    assert alone.data.tokenizer == "bytes"
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SettingsError, match=r"holds no tokenizer \(tokenizer\.json"):
        check(resolve(load(None, {"parallel.device": "cpu", "model.path": str(tmp_path)})))


def test_file_that_is_missing_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--print-config"):
        load(str(tmp_path / "none.toml"), {})
    with pytest.raises(SettingsError, match="cannot read"):
        load(write(tmp_path, "[model\n"), {})
    with pytest.raises(SettingsError, match="must be a table"):
        load(write(tmp_path, "model = 3\n"), {})


# --- settings that cannot work


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_the_default_run_is_two_ranks_on_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(load(None, {"parallel.device": "cpu"}))
    assert (config.parallel.ranks, config.parallel.stage, config.data.tokenizer) == (2, 3, "bytes")
    check(config)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert resolve(load(None, {"parallel.device": "cpu"})).parallel.ranks == 8


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"parallel.ranks": 3}, "data.batch (16) must be a multiple of parallel.ranks * parallel.accumulate (3 * 1"),
        ({"parallel.ranks": 4, "parallel.replicate": 3}, "must be a multiple of parallel.replicate (3)"),
        ({"parallel.replicate": 2, "parallel.stage": 0}, "parallel.replicate must be 1"),
        ({"parallel.ranks": 3, "parallel.tensor": 2}, "must be a multiple of parallel.tensor (2)"),
        ({"parallel.ranks": 4, "parallel.tensor": 4}, "must divide the model's 6 attention heads"),
        ({"activations.keep_on": "cpu"}, "would do nothing beside activations.recompute"),
        (
            {"activations.recompute": "selective", "activations.keep_on": "cpu"},
            "what products return too, on the device",
        ),
        ({"offload.units_ahead": 2}, "would do nothing beside offload.parameters_on"),
        ({"offload.optimizer_on": "cpu", "parallel.stage": 0}, "take stage 1, 2 or 3"),
        ({"offload.parameters_on": "/states"}, "give offload.optimizer_on too"),
        ({"offload.optimizer_on": "nvme"}, 'offload.optimizer_on must be "device", "cpu" or the path of a directory'),
        ({"offload.optimizer_on": "~/states"}, "offload.optimizer_on is '~/states'"),
        (
            {"offload.optimizer_on": "cpu", "offload.parameters_on": "cpu", "parallel.stage": 2},
            "Take parallel.stage 3, or leave offload.parameters_on away",
        ),
        ({"model.hidden": 100}, "model.hidden (100) must be a multiple of model.heads (6)"),
        ({"model.path": "nowhere"}, "found no 'nowhere'"),
        ({"data.train": ["nowhere.txt"]}, "there is no data file or directory 'nowhere.txt'"),
        ({"data.tokenizer": "nowhere"}, "found 'nowhere'"),
        ({"data.vocabulary": 500}, "data.vocabulary = 500 would do nothing beside data.tokenizer = 'bytes'"),
        ({"data.validation_fraction": 0}, "there is nothing to evaluate on"),
        ({"parallel.device": "abacus"}, "parallel.device is 'abacus'"),
        ({"schedule.decay": "constant", "schedule.final_fraction": 0.5}, "schedule.final_fraction = 0.5 would do"),
    ],
)
def test_impossible_settings(overrides: dict[str, object], words: str) -> None:
    config = resolve(load(None, {"parallel.device": "cpu", **overrides}))
    with pytest.raises(SettingsError) as raised:
        check(config)
    assert words in str(raised.value)


@pytest.mark.usefixtures("alone")
def test_more_problems_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("kept")
    config = load(None, {"parallel.device": "cpu", "parallel.ranks": 3, "run.directory": str(tmp_path)})
    with pytest.raises(SettingsError) as raised:
        check(resolve(config))
    assert "data.batch (16)" in str(raised.value)
    assert "must be new or empty" in str(raised.value)


@pytest.mark.usefixtures("alone")
def test_ranks_that_torchrun_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SettingsError, match=r"parallel\.ranks is 2 but torchrun started 4"):
        check(resolve(load(None, {"parallel.device": "cpu", "parallel.ranks": 2})))


@pytest.mark.usefixtures("alone")
def test_model_directories(tmp_path: Path) -> None:
    settings = tmp_path / "config.json"
    settings.write_text('{"model_type": "gpt2", "n_positions": 64}')
    cpu = {"parallel.device": "cpu"}
    with pytest.raises(SettingsError, match="holds no weights"):
        check(resolve(load(None, {**cpu, "model.path": str(tmp_path)})))
    with pytest.raises(SettingsError, match="sequence_length is 128 but the model has 64 positions"):
        check(resolve(load(None, {**cpu, "model.path": str(settings)})))
    check(resolve(load(None, {**cpu, "model.path": str(settings), "data.sequence_length": 64})))
    settings.write_text("{}")
    with pytest.raises(SettingsError, match="model_type"):
        check(resolve(load(None, {**cpu, "model.path": str(settings)})))
