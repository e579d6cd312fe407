"""Where the elements of parameters lie: the flat buffer of a unit, its slices, its whole copy, its gradients' way.

Take from here: `bucket.Bucket`, `gradients.Gradients`, and the arithmetic in `layout`.
"""
