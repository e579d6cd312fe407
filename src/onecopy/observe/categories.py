"""What memory is counted by. The meter and the planner, which imports no torch, speak of the same categories."""

from __future__ import annotations

from typing import Final

MEANINGS: Final = {
    "parameters_sliced": "this rank's slices of the parameters: what the optimizer updates",
    "parameters_gathered": "whole parameters, while they are needed",
    "gradients_whole": "whole gradients, until they have been sent",
    "gradients_sliced": "this rank's slices of the gradients",
    "optimizer": "optimizer states",
    "activations": "what autograd saves; counted in a profiled step alone",
    "checkpoints": "activation checkpoints",
    "communication": "buffers through which collectives send and receive",
    "mirror": "another rank's slices and optimizer states, kept for recovery",
}
CATEGORIES: Final = tuple(MEANINGS)
