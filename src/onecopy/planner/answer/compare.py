"""Compare: the formulas beside the simulated engine, on the same model, micro-batch and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from onecopy.errors import SettingsError
from onecopy.planner.answer.estimate import Job, Option, local_units
from onecopy.planner.engine.step import step_bytes
from onecopy.planner.model.schedule import Schedule, Sizes, Unit
from onecopy.planner.model.shape import checkpointed


@dataclass(frozen=True)
class Comparison:
    """Bytes of the highest moments.

    Attributes:
        rows: (phase, category, by the formulas, by the engine), "all" being the sum.
        bytes_sent: of model states by one rank in a step, by the engine.
    """

    stage: int
    ranks: int
    replicate: int
    rows: list[tuple[str, str, float, float]]
    bytes_sent: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("phase", "category", "formula", "engine")
        return {
            "stage": self.stage,
            "ranks": self.ranks,
            "bytes_sent": self.bytes_sent,
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows],
        }


def compare(job: Job, option: Option, *, config: Path | None, factory: str | None) -> Comparison:
    """Run the engine on fake tensors for ``option``, and the formulas on what each unit really keeps.

    What a block recomputes is counted on neither side, for the meter does not see it.

    Args:
        config: of transformers, for the real architecture.
        factory: ``package.module:factory`` whose module has ``example_inputs``. Without either, a GPT-2 of the job's
            sizes stands for the shape.

    Raises:
        SettingsError: if there is no model to run, or it is to be spread over tensor ranks.
    """
    if option.tensor > 1:
        raise SettingsError("--simulate runs ranks without a tensor axis; give --tensor 1")
    import onecopy
    from onecopy.planner.engine.simulate import simulate

    whole, batch = _model(job, option, config, factory)

    def build() -> Any:
        model = whole()
        if job.loss_bytes is None:
            onecopy.chunk_loss(model)
        return model

    schedule = option.schedule(job)
    units = [
        replace(checkpointed(unit, option.checkpointing), working=0.0)
        for unit in described(build, batch, job.precision)
    ]
    chosen = None
    if option.checkpointing != "off":
        chosen = onecopy.Activations(
            "selective" if option.checkpointing == "selective" else "units",
            offload="cpu" if option.checkpointing.endswith("+cpu") else None,
        )
    engine = simulate(build, batch, schedule, precision=job.precision, activations=chosen)
    found = tabulate(units, schedule, engine.peaks, engine.bytes_sent)
    loss = ("backward", "head and loss, all alive", *_loss(job, option, build, batch))
    return replace(found, rows=[*found.rows, loss])


def _loss(job: Job, option: Option, build: Callable[[], Any], batch: Callable[[], Any]) -> tuple[float, float]:
    """Bytes of head and loss at their height: as the plan has them, and alive on fake tensors.

    The engine's meter sees what autograd keeps of them and no temporaries.
    """
    from onecopy.planner.engine.simulate import describe_units

    measured = describe_units(build, batch, precision=job.precision, temporaries=True)[0].logits
    if job.shape.transformer is None:
        return job.shape.units[0].logits * option.micro_batch * job.widths.compute / 2, measured
    return local_units(job, option)[0].logits, measured


def described(build: Callable[[], Any], batch: Callable[[], Any], precision: str) -> list[Unit]:
    """The units with what they keep of this very batch."""
    from onecopy.planner.engine.simulate import describe_units

    return describe_units(build, batch, precision=precision)


def tabulate(units: list[Unit], schedule: Schedule, engine: dict[str, Sizes], bytes_sent: int) -> Comparison:
    """Both side by side. The meter knows no logits apart and counts no temporaries of the optimizer."""
    rows: list[tuple[str, str, float, float]] = []
    formulas: dict[Any, Sizes] = dict(step_bytes(units, schedule))
    for phase, seen in engine.items():
        if phase not in formulas:
            continue
        formula = dict(formulas[phase])
        formula["activations"] += formula.pop("logits")
        seen = {name: size for name, size in seen.items() if name in formula}
        rows += [(phase, name, formula[name], size) for name, size in seen.items() if size or formula[name]]
        rows.append((phase, "all", sum(formula[name] for name in seen), sum(seen.values())))
    return Comparison(schedule.stage, schedule.shard * schedule.replicate, schedule.replicate, rows, bytes_sent)


def _model(
    job: Job, option: Option, config: Path | None, factory: str | None
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    sizes = job.shape.transformer

    def tokens() -> dict[str, Any]:
        numbers = torch.zeros(option.micro_batch, job.sequence, dtype=torch.long)
        return {"input_ids": numbers, "labels": numbers}

    if config is not None:
        from onecopy.planner.answer.describe import pixels, transformers_builder, transformers_config

        images = pixels(transformers_config(config).to_dict(), option.micro_batch)
        return transformers_builder(config), images or tokens
    if factory is not None and ":" in factory:
        from onecopy.planner.answer.describe import import_factory

        build, module = import_factory(factory)
        if not callable(example := getattr(module, "example_inputs", None)):
            raise SettingsError(f"--simulate needs a function example_inputs(samples) beside the factory {factory!r}")
        return build, lambda: example(option.micro_batch)
    if sizes is None:
        raise SettingsError("--simulate needs a model to run: a config, a factory, or sizes")
    transformers: Any = import_module("transformers")
    small = transformers.GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.hidden,
        n_head=sizes.heads if sizes.hidden % sizes.heads == 0 else 1,
        vocab_size=sizes.vocabulary,
        n_positions=job.sequence,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )

    def build_gpt2() -> Any:
        model = transformers.GPT2LMHeadModel(small)
        model.loss_type = "ForCausalLM"
        return model

    return build_gpt2, tokens
