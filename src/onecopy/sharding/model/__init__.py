"""What is found in a model before it is sharded, and what must not change in it afterwards.

Take from here: `discover` (units), `shared` and `ignored` parameters, `statistics`, `structure` (the guard).
"""
