"""The commands ``kvhash`` and ``kvevents``: thin layers over the SDK, with no logic of their own."""
