"""Commands of README.md and docs/ are run as they stand there. Oracles: exit codes; what each is documented to print.

`FORMS` says what is run, and where the others are run or why they cannot be. A command that no form covers, and a form
that covers none, fail.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from commands import command as call_onecopy
from page_commands import Command, commands

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Form:
    """How the commands that ``pattern`` matches are run.

    Attributes:
        pattern: of the whole command; the first form that matches counts.
        shows: what it prints.
        reason: where it is run, or why it cannot be; "" if it is run here.
    """

    pattern: str
    shows: str = ""
    reason: str = ""


FORMS: Final = [
    Form("onecopy plan --from-(deepspeed|accelerate) .*", shows="stage = "),
    Form("onecopy plan .*--sweep .*", shows="stage 3"),
    Form("onecopy plan .*--(copies|mirror).*", shows="cop(y|ies)"),
    Form("onecopy plan .*--zero-r", shows="C5"),
    Form("onecopy plan .*", shows=r"onecopy\.shard\("),
    Form("onecopy train --help", shows="--learning-rate"),
    Form("onecopy train --print-config", shows="learning_rate"),
    # Elsewhere.
    Form("pip install .*", reason="`.ci/run` installs in a new environment"),
    Form("pytest.*", reason="is what runs this"),
    Form("onecopy train.*", reason="trains for a minute or more: `tests/cli/test_cli_train.py` runs its like"),
    Form("torchrun .*", reason="`test_pages.py` runs the program on two forked ranks; several hosts, or GPUs"),
    Form(
        "onecopy (report|inspect|export|import-deepspeed) .*",
        reason="`tests/cli`, `tests/report`",
    ),
    Form("onecopy tune .*", reason="minutes: `tests/tuner` runs it shorter"),
    Form("onecopy run .*", reason="`tests/resilience/test_launcher.py` runs it with ranks that are lost"),
    Form("sudo .*", reason="network namespaces and other users' processes need root"),
    Form("python benchmarks/.*", reason="takes figures, for minutes or hours; `test_commands.py` parses it"),
    Form("python -c .*", reason="asks for the version of NCCL, which PyTorch for the CPU lacks"),
]


def _form(command: Command) -> Form:
    found = [form for form in FORMS if re.fullmatch(form.pattern, command.text)]
    assert found, f"say in FORMS how this is run, or why not: {command}"
    return found[0]


def _in_blocks() -> list[Command]:
    return [command for command in commands() if command.block]


def _to_run() -> Iterator[object]:
    """Each command of a code block that can run, once."""
    first = {command.words: command for command in reversed(_in_blocks())}
    for command in first.values():
        if not _form(command).reason:
            yield pytest.param(command, id=str(command))


_PACKAGE: Final = """
from torch import nn

def build_model():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages say that a reader has: configs, and a model's factory."""
    made = tmp_path_factory.mktemp("reader")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 4096, **sizes}
    files = {
        "my-llama/config.json": json.dumps(llama),
        "my/__init__.py": "",
        "my/package.py": _PACKAGE,
        "ds_config.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}',
        "fsdp.yaml": "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
    }
    for name, text in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize("command", list(_to_run()))
def test_command_runs(command: Command, folder: Path) -> None:
    assert command.words[0] == "onecopy"
    with mock.patch.dict(os.environ, dict(command.environment), XDG_CACHE_HOME=str(folder / "cache")):
        code, output, errors = call_onecopy(*command.words[1:], folder=folder)
    assert code == 0, f"{code}: {output[-2000:]}\n{errors[-4000:]}"
    assert re.search(_form(command).shows, output), output


def test_every_command_of_a_block_has_a_form_and_every_form_a_command() -> None:
    found = _in_blocks()
    assert len(found) > 50
    assert {_form(command) for command in found} == set(FORMS)
