"""A model as sizes: its units, what is kept between forward and backward, what tensor parallelism leaves of it."""
