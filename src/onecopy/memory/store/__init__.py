"""Stores: where slices rest while nobody computes with them, on the device, in host memory or in files.

`offload.py` is what users say. `files.py` moves bytes to and from a disk, `pages.py` are tensors that rest in a file,
`pool.py` is the memory into which they are brought. `copies.py` moves bytes between a device and the host. `movers.py`
has one of each for a model. What a tensor in a page means to a program is decided by `sharding/tensor/resting`.
"""
