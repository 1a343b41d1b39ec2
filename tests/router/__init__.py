"""The router: its decision by itself, and the whole of it between real processes."""
