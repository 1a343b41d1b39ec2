"""Other languages against the Python SDK."""
