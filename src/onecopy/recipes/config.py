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
        description="A causal language model of transformers: a local directory with config, weights and tokenizer, or "
        "a config.json for random weights. Empty: a small GPT-2 of the sizes below.",
    )
    layers: int = Field(default=4, ge=1, description="Transformer blocks of the small GPT-2.")
    hidden: int = Field(default=192, ge=1, description="Width of the small GPT-2.")
    heads: int = Field(default=6, ge=1, description="Attention heads of the small GPT-2.")


class Data(Section):
    """Which text to train on."""

    train: list[str] = Field(
        default=[],
        description="Files or directories of .txt (a file is a document), .jsonl or .parquet (a row is a document). "
        "Empty: the documentation inside Python's standard library.",
    )
    validation: list[str] = Field(
        default=[], description="Files or directories for evaluation. Empty: the end of the training text."
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the training text that is kept for evaluation, if data.validation is empty.",
    )
    text_field: str = Field(default="text", description="The field of .jsonl and .parquet rows that holds the text.")
    tokenizer: str = Field(
        default="auto",
        description="'bytes': the 256 byte values. 'train': byte-level BPE trained on the training text. Otherwise a "
        "directory with a tokenizer of transformers. 'auto': the model directory's; bytes where model.path names none.",
    )
    vocabulary: int = Field(
        default=4096, ge=257, description="Number of tokens of a tokenizer that is trained on the data."
    )
    sequence_length: int = Field(default=128, ge=2, description="Tokens in a sequence.")
    batch: int = Field(default=16, ge=1, description="Sequences in a step, summed over all ranks and micro-batches.")


class Parallel(Section):
    """How the work is spread over ranks."""

    stage: Annotated[int, AfterValidator(lambda number: Stage.of(number).number)] = Field(
        default=3,
        description="What is sharded. 0: nothing. 1: optimizer states. 2: gradients too. 3: parameters too.",
    )
    ranks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="How many ranks to start. 'auto': the ranks that torchrun started; otherwise 2 on CPU, or one for "
        "each accelerator.",
    )
    replicate: int = Field(
        default=1,
        ge=1,
        description="Copies of the model states. Above 1 (hybrid sharding), ranks / replicate share each copy.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description="Ranks over which the heads and the MLP of each block are spread (tensor parallelism), for GPT-2, "
        "Llama and models built like Llama. These ranks see the same data. ranks / tensor such groups share the batch.",
    )
    sequence: bool = Field(
        default=False,
        description="With tensor: cut norms and what stands between blocks along the sequence, embedding and head "
        "along the vocabulary, so that nothing large is whole on a rank.",
    )
    accumulate: int = Field(default=1, ge=1, description="Micro-batches in a step.")
    precision: Literal["fp32", "bf16", "bf16-lean"] = Field(
        default="fp32",
        description="Dtype in which the model computes and gradients are sent. The optimizer's parameters stay fp32. "
        "Gradients are held and summed in fp32 too, with 'bf16-lean' in bf16.",
    )
    prefetch: int = Field(default=1, ge=0, description="How many units to gather ahead of the one that computes.")
    bucket_bytes: int = Field(
        default=0, ge=0, description="Most bytes of one communication buffer; 0: 4 MiB on the CPU, 2 GiB elsewhere."
    )
    units: str = Field(
        default="auto",
        min_length=1,
        description="What is gathered as one. 'auto': each of the model's repeated blocks. 'one': the whole model. "
        "Otherwise names of classes or modules, with commas between them.",
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

    recompute: bool | Literal["selective"] = Field(
        default=False,
        description="Keep only the inputs of blocks, and compute each block again in backward. 'selective': keep what "
        "matrix products and attention return too, and compute the rest again.",
    )
    partition: bool = Field(
        default=True, description="Cut these inputs over the ranks of parallel.tensor, which all hold the same ones."
    )
    keep_on: str = Field(
        default="device",
        description="Where these inputs are kept: 'device', 'cpu' for host memory, or a directory for files.",
    )


class Loss(Section):
    """How the loss is computed."""

    chunked: bool = Field(
        default=True,
        description="Compute the loss for one chunk of tokens at a time, so that the logits of all tokens are never in "
        "memory together. It works for the kinds of model that are known.",
    )


class Offload(Section):
    """Where model states are kept while they are not computed with."""

    optimizer_on: str = Field(
        default="device",
        description="Masters, optimizer states and gradients: 'device', 'cpu' for host memory, or a directory on a "
        "disk. For stages 1 to 3. The result is the same, to the last bit.",
    )
    parameters_on: str = Field(
        default="device",
        description="Where the slices are kept that stage 3 gathers: 'device', 'cpu' or a directory.",
    )
    units_ahead: int = Field(
        default=1,
        ge=0,
        description="How many units to fetch ahead of the one that computes; replaces parallel.prefetch.",
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
    """What steps. Parameters with fewer than two dimensions are not decayed."""

    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="'adamw', or 'muon': torch.optim.Muon over the matrices of hidden layers, each whole on one rank, "
        "and AdamW over the rest.",
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of Muon's running mean.")
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
        description="After how many steps in a row with a loss or gradients that are not finite the run ends. Such a "
        "step changes no weights, and nothing is saved after it.",
    )


class Schedule(Section):
    """How long to train, and the learning rate on the way."""

    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    warmup: float = Field(default=0.1, ge=0, le=1, description="Share of the steps in which the learning rate rises.")
    decay: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="How the learning rate falls after the warm-up."
    )
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="The learning rate of the last step, as a share of the highest."
    )


class Evaluation(Section):
    """Loss on text that is not trained on."""

    evaluate_every: int = Field(
        default=50, ge=0, description="Steps between evaluations; there is one after the last step too. 0: none."
    )
    evaluate_batches: int = Field(default=4, ge=1, description="Batches in an evaluation; fewer if the text is short.")


class Checkpoint(Section):
    """What is saved to resume from."""

    save_every: int = Field(
        default=50,
        ge=0,
        description="Steps between checkpoints. There is one after the last step too, also if a signal ends the run. "
        "0: none.",
    )
    keep: int = Field(default=2, ge=1, description="How many checkpoints stay; older ones are deleted.")
    save_in_background: bool = Field(
        default=False,
        description="Write while training continues; this costs a copy of the rank's share in host memory.",
    )
    resume: str = Field(
        default="",
        description="What to resume from: a checkpoint, or a directory of checkpoints. 'auto': run.directory, if it "
        "holds a checkpoint; it may then exist already. Empty: start from the beginning.",
    )


class Run(Section):
    """What a run leaves behind."""

    directory: str = Field(
        default="auto",
        description="The directory for config, metrics and summary. It must be new or empty. 'auto': runs/<time>.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights, the order of the data and dropout.")
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
    loss: Loss = Loss()
    offload: Offload = Offload()
    recovery: Recovery = Recovery()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
