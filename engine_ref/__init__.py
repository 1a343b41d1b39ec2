"""A readable reference engine: vLLM's KV cache manager and scheduler, their events and metrics, without a GPU."""
