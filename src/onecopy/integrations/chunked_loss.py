"""Chunked loss: causal LMs of transformers compute their loss in chunks, `onecopy.chunked_cross_entropy`.

In a forward with labels the head makes the loss itself, while its weight is whole, and the model's `loss_function`,
which transformers lets be set, hands that on. Without labels the model computes what it always has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onecopy.errors import SettingsError
from onecopy.loss.cross_entropy import chunked_cross_entropy
from onecopy.planner.model.loss import chunks_loss


def chunk_loss(model: Any) -> bool:
    """Change a causal LM of transformers, in place, to compute its loss in chunks. Call it before `onecopy.shard`.

    If labels are given, the model's output then has no logits. Parameters, their names and checkpoints do not change.

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
        raise SettingsError(
            f"chunk_loss takes a causal LM of transformers; found {type(model).__name__}. Another model calls "
            f"onecopy.chunked_cross_entropy in its forward"
        )
    head = model.get_output_embeddings()
    if not chunks_loss(config.to_dict()) or not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    if isinstance(head, ChunkedHead):
        return True
    made = ChunkedHead(head, model.loss_function)
    made.attend(model)
    return True


class ChunkedHead(nn.Linear):
    """A head that makes the loss where there are labels, and logits where there are none.

    Args:
        head: whose parameter it takes, which may be the input embedding's too.
        whole: the loss of logits, for forwards in which there are logits.
    """

    def __init__(self, head: nn.Linear, whole: Callable[..., Tensor]) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta", dtype=head.weight.dtype)
        self.weight = head.weight
        self.train(head.training)
        self.whole = whole
        # What the model was called with, where a loss is to be made.
        self._named: dict[str, Any] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Of shape (..., in_features) to (..., out_features), or to the loss, a scalar."""
        named = self._named
        if named is None:
            return super().forward(input)
        return self._chunked(input, self.weight, named, None)

    def _chunked(self, input: Tensor, weight: Tensor, named: dict[str, Any], tensor: Any) -> Tensor:
        ignored, items, labels = (named.get(name) for name in ("ignore_index", "num_items_in_batch", "shift_labels"))
        ignored = -100 if ignored is None else ignored
        if labels is None:
            labels = nn.functional.pad(named["labels"], (0, 1), value=ignored)[..., 1:]
        reduction = "mean" if items is None else "sum"
        found = chunked_cross_entropy(
            input, weight, labels.to(input.device), ignore_index=ignored, reduction=reduction, tensor=tensor
        )
        return found if items is None else found / items

    def expect(self, model: Any, _: Any, named: dict[str, Any]) -> None:
        """The model's forward begins. Who wants a tuple counts on its places, one of which is the logits'."""
        tuples = named.get("return_dict", model.config.return_dict) is False
        self._named = None if named.get("labels") is None or tuples else named

    def forget(self, _: nn.Module, __: Any, output: Any) -> Any:
        """The model's forward has ended; what its output calls logits would be the loss."""
        if self._named is None or output is None:
            return output
        self._named = None
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def attend(self, model: Any) -> None:
        """Make the loss of ``model`` from now on."""
        model.set_output_embeddings(self)
        model.loss_function = self.loss
        self._hooks = (
            model.register_forward_pre_hook(self.expect, with_kwargs=True),
            model.register_forward_hook(self.forget, always_call=True),
        )

    def retire(self) -> None:
        """Another head takes over."""
        for hook in self._hooks:
            hook.remove()

    def loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Tensor:
        """What the model's forward takes for its loss function: the loss is made, unless there are logits."""
        return self.whole(logits, labels, vocab_size, **more) if self._named is None else logits
