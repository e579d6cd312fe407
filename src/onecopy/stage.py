"""Stage: which model states are sharded. The only place where a stage number is interpreted.

Everywhere else the code asks for a property. The rows are those of ZeRO §5 (arXiv 1910.02054):

=====  =========  =========  ==========  =======================  ===========================
stage  optimizer  gradients  parameters  bytes a rank holds       elements a rank sends a step
=====  =========  =========  ==========  =======================  ===========================
0      whole      whole      whole       (4 + K)Ψ                 2Ψ
1      sharded    whole      whole       4Ψ + KΨ/N                2Ψ
2      sharded    sharded    whole       2Ψ + (2 + K)Ψ/N          (g + 1)Ψ
3      sharded    sharded    sharded     (4 + K)Ψ/N               3gΨ
=====  =========  =========  ==========  =======================  ===========================

Elements are to be multiplied by (N - 1)/N; g is the number of micro-batches in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onecopy.errors import SettingsError


@dataclass(frozen=True)
class Stage:
    """What ZeRO shards at one stage.

    Attributes:
        number: the paper's number, for messages only.
        shards_optimizer: each rank updates its slice of the parameters only.
        shards_gradients: a gradient leaves the rank in every micro-batch; otherwise once a step.
        shards_parameters: whole parameters live only while their unit computes; otherwise until the next step.
    """

    number: int
    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool

    @staticmethod
    def of(number: int) -> Stage:
        """The stage of that number.

        Raises:
            SettingsError: if ``number`` is not one of 0, 1, 2, 3.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number not in _STAGES:
            raise SettingsError(
                f"stage must be 0 (nothing sharded), 1 (optimizer states), 2 (and gradients) or 3 (and parameters); "
                f"found {number!r}"
            )
        return _STAGES[number]


_STAGES: Final = {
    0: Stage(0, shards_optimizer=False, shards_gradients=False, shards_parameters=False),
    1: Stage(1, shards_optimizer=True, shards_gradients=False, shards_parameters=False),
    2: Stage(2, shards_optimizer=True, shards_gradients=True, shards_parameters=False),
    3: Stage(3, shards_optimizer=True, shards_gradients=True, shards_parameters=True),
}
