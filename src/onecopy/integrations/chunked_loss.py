"""Chunked loss: causal LMs of transformers compute their loss in chunks, `onecopy.chunked_cross_entropy`.

In a forward with labels the head hands its input on, and the model's `loss_function`, which transformers lets be set,
makes the loss of it and of the head's weight. Without labels the model computes what it always has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onecopy.errors import SettingsError
from onecopy.loss import chunked_cross_entropy
from onecopy.planner.model.loss import chunks_loss


def chunk_loss(model: Any) -> bool:
    """Let a causal LM of transformers compute its loss in chunks, in place; call it before `onecopy.shard`.

    With labels the model's output has no logits then. Parameters, their names and checkpoints stay what they are.

    Args:
        model: before it is sharded.

    Returns:
        Whether it was done: not for models whose loss has more to it than their head's product and a cross-entropy
        (`planner.model.loss.CHUNKED` lists those that are known), which stay as they are.

    Raises:
        SettingsError: if it is no model of transformers.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise SettingsError(f"chunk_loss takes a causal LM of transformers; found {type(model).__name__}")
    head = model.get_output_embeddings()
    if not chunks_loss(config.to_dict()) or not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    if isinstance(head, ChunkedHead):
        return True
    made = ChunkedHead(head, model.loss_function)
    model.set_output_embeddings(made)
    model.loss_function = made.loss
    model.register_forward_pre_hook(made.expect, with_kwargs=True)
    model.register_forward_hook(made.forget, always_call=True)
    return True


class ChunkedHead(nn.Linear):
    """A head that hands its input on while a loss is to be made of it.

    Args:
        head: whose parameter it takes, which may be the input embedding's too.
        whole: the loss of logits, for forwards in which there are logits.
    """

    def __init__(self, head: nn.Linear, whole: Callable[..., Tensor]) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta", dtype=head.weight.dtype)
        self.weight = head.weight
        self.train(head.training)
        self.waits = False
        self._whole = whole

    def forward(self, input: Tensor) -> Tensor:
        """Of shape (..., in_features) to (..., out_features), or ``input`` itself."""
        return input if self.waits else super().forward(input)

    def expect(self, model: Any, _: Any, named: dict[str, Any]) -> None:
        """The model's forward begins. Who wants a tuple counts on its places, one of which is the logits'."""
        self.waits = named.get("labels") is not None and named.get("return_dict", model.config.return_dict) is not False

    def forget(self, _: nn.Module, __: Any, output: Any) -> Any:
        """The model's forward has ended; what its output calls logits would be the head's input."""
        if not self.waits or output is None:
            return output
        self.waits = False
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """What `ForCausalLMLoss` of transformers computes, of the head's input in place of logits."""
        if not self.waits:
            return self._whole(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        found = chunked_cross_entropy(
            logits, self.weight, shift_labels.to(logits.device), ignore_index=ignore_index, reduction=reduction
        )
        return found if num_items_in_batch is None else found / num_items_in_batch
