"""When what happens: the hooks that carry a model through forward and backward, and the orders they keep.

Take from here: `engine.Engine` and `engine.find_engine`; `unit.Unit`.
"""
