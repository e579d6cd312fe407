"""What helps when nothing fits: cheap settings before hardware. Oracles: bytes by hand, onecopy train's own default."""

from __future__ import annotations

from dataclasses import replace

from onecopy.planner.answer.advice import Wishes, _grown, advise
from onecopy.planner.answer.estimate import Job
from onecopy.planner.machine.machine import Machine, gpu_of
from onecopy.planner.model.schedule import Schedule
from onecopy.planner.model.shape import from_count
from onecopy.recipes.config import Optimizer

CARD = Machine(1, gpu_of("rtx4090", memory=24e9))


def test_the_planner_takes_the_optimizer_that_train_takes() -> None:
    job = Job(from_count(1e9), 2048)
    assert job.implementation == Schedule(0, 1).implementation == Optimizer().implementation == "fused"


def test_1b_on_one_card_of_24_gb_fits() -> None:
    """By hand: 1.1B × (4 of master, 8 of Adam, 4 of gradients, 2 gathered) are 19.8 GB; the fourth copy of 4.4 GB that
    foreach holds is what made it not fit."""
    advice = advise(Job(from_count(1.1e9), 2048), CARD, Wishes(stage=0, micro_batch=1))
    assert advice.best is not None
    assert 19.8e9 < advice.best.peak < 22.8e9


def test_cheap_settings_come_before_hardware() -> None:
    """1.1B with foreach on 24 GB: fused is enough, and is said first."""
    job = Job(from_count(1.1e9), 2048, implementation="foreach")
    words = [remedy.words for remedy in advise(job, CARD, Wishes(stage=0, micro_batch=1)).remedies]
    assert words[0].startswith("AdamW fused: ")
    hardware = [place for place, text in enumerate(words) if "GPUs" in text]
    assert hardware
    assert min(hardware) > max(place for place, text in enumerate(words) if "fused" in text or "bf16-lean" in text)


def test_bf16_lean_is_a_remedy() -> None:
    """By hand: 1.25B × 18 bytes are 22.5 GB before anything else; with 2 bytes of gradients 16 × 1.25 = 20 GB."""
    advice = advise(Job(from_count(1.25e9), 2048), CARD, Wishes(stage=0, micro_batch=1))
    assert advice.best is None
    assert advice.remedies[0].words.startswith("bf16-lean")
    assert advice.remedies[0].found.peak > 20e9


def test_more_gpus_fill_a_node_first() -> None:
    """Never "2 GPUs, on 2 nodes": of 30 GB of states one card holds none, two do; eight GPUs are a node."""
    one = advise(Job(from_count(1.9e9), 1024), CARD, Wishes(stage=3, micro_batch=1, checkpointing="units", tensor=1))
    eight = advise(Job(from_count(20e9), 1024), replace(CARD, gpus=8), Wishes(stage=3, micro_batch=1, tensor=1))
    words = [remedy.words for advice in (one, eight) for remedy in advice.remedies if " GPUs" in remedy.words]
    assert not [text for text in words if "2 GPUs, on 2 nodes" in text]
    assert _grown(CARD, 2) == replace(CARD, gpus=2)
    assert _grown(CARD, 16) == replace(CARD, gpus=16, nodes=2)
    assert _grown(replace(CARD, gpus=8), 2) == replace(CARD, gpus=16, nodes=2)
    assert _grown(replace(CARD, gpus=12, nodes=2), 2) == replace(CARD, gpus=24, nodes=3)


def test_every_remedy_fits_its_host_too() -> None:
    """30B on a card of 24 GB: the option that holds least of it moves 517 GB to the host, which has 32."""
    card = replace(CARD, host_memory=32e9)
    for wishes in (Wishes(stage=2), Wishes(stage=2, preset="safe"), Wishes(stage=0)):
        remedies = advise(Job(from_count(30e9), 4096), card, wishes).remedies
        assert remedies
        assert not [remedy.words for remedy in remedies if not remedy.found.fits]


def test_a_larger_host_is_a_remedy() -> None:
    """By hand: 2B at stage 2 leave 2 bytes each on the card of 24 GB and move 16, 32 GB, to a host of 16."""
    job = Job(from_count(2e9), 1024)
    wishes = Wishes(stage=2, micro_batch=1, checkpointing="units", tensor=1)
    advice = advise(job, replace(CARD, host_memory=2e9), wishes)
    words = [remedy.words for remedy in advice.remedies if remedy.words.startswith("hosts of")]
    assert len(words) == 1
    assert all(remedy.found.fits for remedy in advice.remedies)
