"""Config: every key of the training job, with its default and what it means. Reading and writing is `settings.py`'s."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from onecopy.stage import Stage


class Section(BaseModel):
    """A table of keys. Unknown keys are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(Section):
    """Which model to train."""

    path: str = Field(
        default="",
        description="A causal LM of transformers: a local directory (config, weights, tokenizer) or a config.json "
        "(random weights). Empty: a small GPT-2 of the sizes below.",
    )
    layers: int = Field(default=4, ge=1, description="Transformer blocks of the small GPT-2.")
    hidden: int = Field(default=192, ge=1, description="Width of the small GPT-2.")
    heads: int = Field(default=6, ge=1, description="Attention heads of the small GPT-2.")


class Data(Section):
    """What to read."""

    train: list[str] = Field(
        default=[],
        description="Files or directories of .txt (a file is a document), .jsonl or .parquet (a row is a document). "
        "Empty: the text of Python's own documentation, from the standard library.",
    )
    validation: list[str] = Field(
        default=[], description="The same for evaluation. Empty: the end of the training text."
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the training text kept for evaluation when no validation is given.",
    )
    text_field: str = Field(default="text", description="The field of .jsonl and .parquet rows that holds the text.")
    tokenizer: str = Field(
        default="auto",
        description="'bytes': the 256 byte values. 'train': byte-level BPE trained on the training text. Otherwise a "
        "directory with a tokenizer of transformers. 'auto': the model directory's, or else bytes.",
    )
    vocabulary: int = Field(default=4096, ge=257, description="Tokens of a tokenizer trained on the data.")
    sequence_length: int = Field(default=128, ge=2, description="Tokens in a sequence.")
    batch: int = Field(default=16, ge=1, description="Sequences in a step, over all ranks and micro-batches.")


class Parallel(Section):
    """How the work is spread over ranks."""

    stage: Annotated[int, AfterValidator(lambda number: Stage.of(number).number)] = Field(
        default=3,
        description="What is sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters.",
    )
    ranks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Ranks to start. 'auto': as many as torchrun started, else 2 on CPU or one for each accelerator.",
    )
    replicate: int = Field(
        default=1, ge=1, description="Copies of the model states: hybrid sharding over ranks / replicate when above 1."
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description="Ranks over which each block's heads and MLP are spread (tensor parallelism), for GPT-2 and Llama "
        "and what is built like it. They see the same data; ranks / tensor share the batch.",
    )
    accumulate: int = Field(default=1, ge=1, description="Micro-batches in a step.")
    precision: Literal["fp32", "bf16", "bf16-lean"] = Field(
        default="fp32",
        description="Dtype of compute and of what is sent; the optimizer's parameters stay fp32. Gradients are held "
        "and summed in fp32 too, with 'bf16-lean' in bf16.",
    )
    prefetch: int = Field(default=1, ge=0, description="Units to gather ahead of the one that computes.")
    bucket_bytes: int = Field(
        default=0, ge=0, description="Most bytes of one communication buffer; 0: 4 MiB on the CPU, 256 MiB elsewhere."
    )
    defragment: bool = Field(
        default=False, description="Keep gradients and activation checkpoints in memory regions of their own."
    )
    device: str = Field(
        default="auto", description="'cpu', 'cuda', ... 'auto': an accelerator if there is one, else cpu."
    )
    timeout: float = Field(
        default=300,
        gt=0,
        description="Seconds that a rank waits for another, in a collective or while data is prepared.",
    )


class Activations(Section):
    """What is kept from forward to backward."""

    recompute: bool = Field(
        default=False, description="Keep the inputs of blocks alone, and compute each block again in backward."
    )
    partition: bool = Field(
        default=True, description="Cut those inputs over the ranks of parallel.tensor, which hold them alike."
    )
    keep_on: str = Field(
        default="device",
        description="Where those inputs are kept: 'device', 'cpu' for host memory, or a directory for files.",
    )


class Offload(Section):
    """Where model states rest while nobody computes with them."""

    optimizer_on: str = Field(
        default="device",
        description="Masters, optimizer states and gradients: 'device', 'cpu' for host memory, or a directory on a "
        "disk. For stages 1 to 3; the result is the same to the last bit.",
    )
    parameters_on: str = Field(
        default="device",
        description="What stage 3 gathers parameters from: 'device', 'cpu' or a directory.",
    )
    units_ahead: int = Field(
        default=1, ge=0, description="Units to bring ahead of the one that computes, in place of parallel.prefetch."
    )


class Recovery(Section):
    """A lost rank comes back from its peers' memory. Off unless mirror or copies say who holds its slices too."""

    mirror: bool | Literal["cpu"] = Field(
        default=False,
        description="Have the rank before each one hold its slices too; 'cpu': in host memory.",
    )
    copies: int = Field(
        default=1, ge=1, description="Ranks that hold each slice; the same as parallel.replicate, with recovery."
    )
    spares: int = Field(default=0, ge=0, description="Processes more, that wait for the loss of a rank.")
    heartbeat: float = Field(
        default=0, ge=0, description="Seconds after which a rank that does not answer is given up; 0: never."
    )

    @property
    def is_on(self) -> bool:
        """Whether lost ranks come back."""
        return bool(self.mirror) or self.copies > 1


class Optimizer(Section):
    """AdamW. Parameters with fewer than two dimensions are not decayed."""

    learning_rate: float = Field(default=1e-3, gt=0, description="The highest learning rate of the schedule.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the squared gradient's running mean.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    implementation: Literal["fused", "foreach", "for-loop"] = Field(
        default="fused", description="Which AdamW of PyTorch runs."
    )
    clip_norm: float = Field(default=1.0, ge=0, description="Gradients are scaled down to this global norm. 0: never.")
    not_finite_steps: int = Field(
        default=3,
        ge=1,
        description="A step whose loss or gradients are not finite changes no weights, and nothing is saved after it. "
        "So many of them in a row end the run.",
    )


class Schedule(Section):
    """How long to train, and the learning rate on the way."""

    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    warmup: float = Field(default=0.1, ge=0, le=1, description="Share of the steps in which the learning rate rises.")
    decay: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="How it falls after the warm-up."
    )
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="What is left of the learning rate in the last step."
    )


class Evaluation(Section):
    """Loss on text that is not trained on."""

    evaluate_every: int = Field(
        default=50, ge=0, description="Steps between evaluations; the last step has one too. 0: none."
    )
    evaluate_batches: int = Field(
        default=4, ge=1, description="Batches in an evaluation, fewer when the text is short."
    )


class Checkpoint(Section):
    """What is kept to go on from."""

    save_every: int = Field(
        default=50,
        ge=0,
        description="Steps between checkpoints; the last step has one too, and one that a signal ends. 0: none.",
    )
    keep: int = Field(default=2, ge=1, description="Checkpoints that stay; older ones are deleted.")
    save_in_background: bool = Field(
        default=False, description="Write while training goes on; it costs a copy of the rank's share in host memory."
    )
    resume: str = Field(
        default="",
        description="Go on from here: a checkpoint, or a directory of them. 'auto': from run.directory, if it has one, "
        "which may then exist already. Empty: from the start.",
    )


class Run(Section):
    """What a run leaves behind."""

    directory: str = Field(
        default="auto", description="Holds the config, metrics and summary. Must be new or empty. 'auto': runs/<time>."
    )
    seed: int = Field(default=0, ge=0, description="Of the initial weights, the order of the data and dropout.")
    log_every: int = Field(default=1, ge=1, description="Steps between entries in metrics.jsonl and TensorBoard.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard events.")
    profile_step: int = Field(
        default=3, ge=0, description="The step whose timeline and memory go to trace/ for `onecopy report`; 0: none."
    )


class Config(Section):
    """The whole training job."""

    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    activations: Activations = Activations()
    offload: Offload = Offload()
    recovery: Recovery = Recovery()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
