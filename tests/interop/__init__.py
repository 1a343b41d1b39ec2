"""Other languages against Python and the recorded vLLM outputs."""
