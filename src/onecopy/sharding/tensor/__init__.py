"""What a parameter is: a `SlicedTensor` of the full shape that holds one rank's elements, and what operations do to it.

Take from here: `sliced.SlicedTensor`; the gradients that are not plain slices (`pending`, `narrow`); `single` to make
one tensor whole. `operations` fills the table of rules when it is imported.
"""
