"""Paste: a plan as what a user writes: the call, the training job's config, and the whole plan as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from onecopy.planner.answer.advice import Advice
from onecopy.planner.answer.errors import errors
from onecopy.planner.answer.estimate import Estimate, Job, Option
from onecopy.planner.machine.machine import Machine
from onecopy.planner.model.tensor import KNOWN
from onecopy.stage import Stage


def shard_call(job: Job, found: Estimate) -> str:
    """Python that shards a model as planned."""
    option = found.option
    arguments = [f"stage={option.stage}", f'precision="{job.precision}"']
    lines = []
    axes = {"shard": option.shard}
    if option.replicate > 1 and Stage.of(option.stage).shards_optimizer:
        axes = {"replicate": option.replicate} | axes
    if option.tensor > 1:
        axes |= {"tensor": option.tensor}
    if len(axes) > 1:
        sizes, names = ", ".join(map(str, axes.values())), ", ".join(f'"{name}"' for name in axes)
        lines.append(f'mesh = torch.distributed.init_device_mesh("cuda", ({sizes}), mesh_dim_names=({names}))')
        arguments.append("mesh=mesh")
    if job.loss_bytes is None:
        lines.append("onecopy.chunk_loss(model)  # a model of transformers; others call onecopy.chunked_cross_entropy")
    if option.tensor > 1:
        lines = ["from onecopy.recipes.tensor_parallel import parallelize", "", *lines]
        # Other models are cut by torch's own parallelize_module.
        more = ", sequence=True" if option.sequence else ""
        lines.append(f'parallelize(model, mesh["tensor"]{more})  # for {", ".join(KNOWN)} of transformers')
    if option.checkpointing == "selective":
        lines.append("# a model of transformers: model.config.use_cache = False, so that blocks can be repeated")
    if option.accumulate > 1:
        arguments.append(f"accumulate={option.accumulate}")
    if option.checkpointing != "off":
        arguments.append(f"activations=onecopy.Activations({_activations(option)})")
    if option.offload != "none":
        lines = [*([_STATES] if option.offload.endswith("nvme") else []), *lines]
        arguments.append(f"offload=onecopy.Offload({_offload(option)})")
    if job.implementation == "muon":
        # Repeated blocks have a number in their parameters' names.
        lines.append("def is_hidden(name, p):")
        lines.append('    return p.ndim == 2 and any(part.isdigit() for part in name.split("."))')
        lines.append("hidden = [name for name, p in model.named_parameters() if is_hidden(name, p)]")
        arguments.append("whole=hidden")
    if found.loads_on_meta:
        lines.append('# built inside `with torch.device("meta"):`, for it does not fit beside its slices')
    lines.append(f"model = onecopy.shard(model, {', '.join(arguments)})")
    if found.loads_on_meta:
        lines.append('onecopy.materialize(model, device="cuda")')
    if job.implementation == "fused":
        lines.append("optimizer = torch.optim.AdamW(model.parameters(), fused=True)")
    if job.implementation == "muon":
        lines.append("named = dict(model.named_parameters())")
        lines.append('muon = torch.optim.Muon([named.pop(name) for name in hidden], adjust_lr_fn="match_rms_adamw")')
        lines.append("adamw = torch.optim.AdamW(named.values(), fused=True)")
    return "\n".join(lines)


def _activations(option: Option) -> str:
    """Arguments of `onecopy.Activations`, as far as they are not its defaults."""
    arguments = ['"selective"'] if option.checkpointing == "selective" else []
    if option.tensor > 1 and not option.checkpointing.startswith("P_a"):
        arguments.append("partition=False")
    if option.checkpointing.endswith("+cpu"):
        arguments.append('offload="cpu"')
    return ", ".join(arguments)


_STATES = 'states = "/nvme/states"  # a directory on each node\'s own disk'


def _offload(option: Option) -> str:
    """Arguments of `onecopy.Offload`."""
    place = '"cpu"' if option.offload.endswith("cpu") else "states"
    return f"optimizer={place}" + (f", parameters={place}" if option.offload.startswith("parameters") else "")


_YOURS = "path/of/your/model"


def config_toml(job: Job, machine: Machine, found: Estimate, model: str | None) -> str:
    """The keys of `onecopy train`'s config that the plan decides.

    Args:
        model: path of a transformers model or config; None asks for one, for without any another model is trained.
    """
    option = found.option
    lines = ["[model]", f'path = "{model or _YOURS}"', ""]
    lines += [
        "[data]",
        f"sequence_length = {job.sequence}",
        f"batch = {option.micro_batch * option.accumulate * machine.gpus // option.tensor}",
        "",
        "[parallel]",
        f"stage = {option.stage}",
        f"ranks = {machine.gpus}",
        f"accumulate = {option.accumulate}",
    ]
    if option.tensor > 1:
        lines.append(f"tensor = {option.tensor}")
    if option.sequence:
        lines.append("sequence = true")
    if job.precision != "fp16":
        lines.append(f'precision = "{job.precision}"')
    if Stage.of(option.stage).shards_optimizer and option.replicate > 1:
        lines.append(f"replicate = {option.replicate}")
    kind = "optimizer" if job.implementation == "muon" else "implementation"
    lines += ["", "[optimizer]", f'{kind} = "{job.implementation}"']
    if job.loss_bytes is not None:
        lines += ["", "[loss]", "chunked = false"]
    if option.checkpointing != "off":
        how = '"selective"' if option.checkpointing == "selective" else "true"
        lines += ["", "[activations]", f"recompute = {how}"]
    if option.tensor > 1 and option.checkpointing in ("selective", "units", "units+cpu"):
        lines.append("partition = false")
    if option.checkpointing.endswith("+cpu"):
        lines.append('keep_on = "cpu"')
    if option.offload != "none":
        place = "cpu" if option.offload.endswith("cpu") else "/nvme/states"
        lines += ["", "[offload]", f'optimizer_on = "{place}"']
        lines += [f'parameters_on = "{place}"'] if option.offload.startswith("parameters") else []
    return "\n".join(lines) + "\n"


def as_dict(job: Job, machine: Machine, advice: Advice) -> dict[str, Any]:
    """The whole plan for programs: bytes, seconds and tokens a second, every option with what it needs."""
    return {
        "model": {
            "name": job.shape.name,
            "parameters": job.shape.parameters,
            "units": len(job.shape.units),
            "transformer": asdict(job.shape.transformer) if job.shape.transformer else None,
        },
        "sequence": job.sequence,
        "precision": job.precision,
        "machine": {
            "gpus": machine.gpus,
            "nodes": machine.nodes,
            "gpu": machine.gpu._asdict(),
            "link": machine.link,
            "host_memory": machine.host_memory,
        },
        "errors": errors(machine, job.shape)._asdict(),
        "reason": advice.reason,
        "best": estimate_dict(advice.best),
        "runner_up": estimate_dict(advice.runner_up),
        "later": estimate_dict(advice.later),
        "remedies": [
            {"words": remedy.words, "available": remedy.available, "estimate": estimate_dict(remedy.found)}
            for remedy in advice.remedies
        ],
        "options": [estimate_dict(found, brief=True) for found in advice.estimates],
    }


def as_json(plan: dict[str, Any]) -> str:
    """A plan, with what was added to it, as JSON: indented, but for the options, which take a line each."""
    lines = ",\n    ".join(json.dumps(option, ensure_ascii=False) for option in plan["options"])
    text = json.dumps({**plan, "options": []}, indent=2, ensure_ascii=False)
    return text.replace('\n  "options": []', f'\n  "options": [\n    {lines}\n  ]', 1)


def estimate_dict(found: Estimate | None, *, brief: bool = False) -> dict[str, Any] | None:
    """One option for programs.

    Args:
        brief: of ``memory`` only categories that hold something in a step's phases, in whole bytes; of an option that
            does not fit only the phase of its peak; and six digits of seconds and speed. There are hundreds of options.
    """
    if found is None:
        return None
    memory: dict[str, dict[str, float]] = {phase: dict(sizes) for phase, sizes in found.peaks.items()}
    seconds = {**found.seconds._asdict(), "total": found.seconds.total}
    speed = found.tokens_per_second
    if brief:
        phases = ("forward", "backward", "step") if found.fits else (found.peak_phase,)
        memory = {phase: {name: round(n) for name, n in memory[phase].items() if n} for phase in phases}
        seconds = {name: float(f"{number:.6g}") for name, number in seconds.items()}
        speed = float(f"{speed:.6g}")
    return {
        "option": asdict(found.option),
        "available": found.available,
        "missing": list(found.option.missing),
        "fits": found.fits,
        "peak_bytes": found.peak,
        "peak_phase": found.peak_phase,
        "limit_bytes": found.limit,
        "memory": memory,
        "host_bytes": found.host,
        "bytes_sent": found.bytes_sent,
        "activations_sent": found.activations_sent,
        "seconds": seconds if found.rate else None,
        "tokens_per_second": speed if found.rate == "tokens" else None,
        "samples_per_second": speed if found.rate == "samples" else None,
        "limited_by": found.limited_by,
    }
