"""The calls that users make: `shard`, `gathered`, `materialize`, `ema`, `profile`, and what they check first.

Take from here what `onecopy`'s face offers. `profile` stands here and not in `observe/`, since it looks into an engine.
"""
