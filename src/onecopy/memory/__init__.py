"""Where bytes live: staging buffers of constant size."""
