"""ZeRO-DP. Rooms, each resting on those before it: graph, tensor, bucket, model, engine, setup."""
