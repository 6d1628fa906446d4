"""What a model directory is: config, tensor manifest, shard reader, GGUF import, packaged models."""
