"""The loss of a language model's head, without its logits in memory."""
