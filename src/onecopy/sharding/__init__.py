"""ZeRO-DP: layout → sliced tensor → bucket → unit → schedule → api, each file resting on those before it."""
